"""Legal layouts of a model, and what follows from them. Illegal ones: test_illegal_layouts.py. Not covered: that a
legal layout trains (tests/distributed)."""

import math

import pytest

from megarlhf.architectures.hf_config import router_aux_loss_of_config
from megarlhf.planning.layout import check_role
from megarlhf.planning.preflight import preflight
from tests.planning.configs import sft
from tests.planning.illegal import EXPERTS
from tests.refuses import refuses


def check(paths, parallel, name="checked", **changes):
    """Architecture and layout of a role whose model has `changes`, on one data-parallel rank."""
    actor = sft(paths, model=paths["make"](name, **changes), parallel=parallel).actor
    return check_role("actor", actor, math.prod(parallel.get(axis, 1) for axis in ("tp", "pp", "ep")))


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_may_share_a_kv_head_if_its_rows_can_be_cut(paths, tp):
    """12 heads, 2 KV heads of 8 channels: (12 + 2 x 2) x 8 = 128 rows of QKV are cut by 4."""
    arch, layout = check(paths, {"tp": tp}, num_key_value_heads=2, intermediate_size=192)
    assert (arch.num_kv_heads, layout.tp) == (2, tp)


def test_the_width_of_experts_counts_and_not_that_of_a_dense_mlp(paths):
    parallel, sizes = {"tp": 4, "sequence_parallel": True}, EXPERTS | {"intermediate_size": 7}
    arch, _ = check(paths, parallel, **sizes)
    assert (arch.num_experts, arch.expert_ffn_size) == (4, 24)
    with refuses("tp = 4", "6 MLP width", "1, 2"):
        check(paths, parallel, "narrow", **sizes | {"moe_intermediate_size": 6})


def test_a_load_balancing_loss_is_of_experts_and_its_words_are_read(paths):
    """A coefficient for a model without experts is refused, 0 is not; what config.json says wrongly is named."""
    dense = sft(paths).actor
    check_role("actor", dense.model_copy(update={"router_aux_loss_coef": 0.0}), 1)
    with refuses("actor.router_aux_loss_coef = 0.01", "no experts"):
        check_role("actor", dense.model_copy(update={"router_aux_loss_coef": 0.01}), 1)
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    for name, changes, value in (
        ("e", {"output_router_logits": "yes"}, "output_router_logits = 'yes'"),
        ("f", {"output_router_logits": True, "router_aux_loss_coef": -1}, "router_aux_loss_coef = -1"),
    ):
        with refuses(value, "expected"):
            check(paths, {}, name, **experts, **changes)
    said = {"output_router_logits": True}
    assert router_aux_loss_of_config(said, "")[0] == 0.001
    assert router_aux_loss_of_config(said | {"router_aux_loss_coef": 0.02}, "")[0] == 0.02
    assert router_aux_loss_of_config({"router_aux_loss_coef": 0.02}, "")[0] == 0.0


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("mlp", [False, True])
def test_biases_of_attention_and_mlp_are_free_of_each_other(paths, attention, mlp):
    arch, _ = check(paths, {}, attention_bias=attention, mlp_bias=mlp)
    assert (arch.qkv_bias, arch.output_bias, arch.mlp_bias) == (attention, attention, mlp)


def test_a_legal_role_has_the_architecture_and_layout_that_follow(paths):
    arch, layout = check_role("actor", sft(paths, parallel={"tp": 4, "pp": 3}).actor, 24)
    assert (arch.num_layers, arch.num_kv_heads, arch.ffn_size) == (6, 4, 160)
    assert (layout.tp, layout.pp, layout.dp, layout.cp) == (4, 3, 2, 1)


def test_context_parallel_ranks_are_said(paths):
    """Of twelve ranks at tp 2 x cp 3 two are data-parallel; nothing but the world has to divide by cp."""
    _, layout = check_role("actor", sft(paths, parallel={"tp": 2, "cp": 3}).actor, 12)
    assert str(layout) == "tp 2 x cp 3 x pp 1 x dp 2"
    assert layout.groups(["cp"])[:2] == [(0, 2, 4), (1, 3, 5)]


def test_uneven_stages_that_add_up_are_legal(paths):
    for layers in ([1, 2, 2, 1], [1, 3, 1, 1]):
        assert preflight("sft", sft(paths, parallel={"pp": 4, "layers_per_stage": layers}), 4).numbers


def test_virtual_stages_are_told(paths):
    for parallel in ({"pp": 2, "vpp": 3}, {"pp": 2, "vpp": 2, "layers_per_stage": [1, 2, 2, 1]}):
        ((_, _, layout),) = preflight("sft", sft(paths, parallel=parallel), 4).roles
        assert layout == f"tp 1 x pp 2 x dp 2, vpp {parallel['vpp']} = 4 ranks"
