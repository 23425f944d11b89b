"""Which layouts of a model are legal, and what a refusal advises. Not covered: that a legal layout trains
(tests/distributed)."""

import math

import pytest

from megarlhf.architectures.hf_config import router_aux_loss_of_config
from megarlhf.planning.layout import check_role
from megarlhf.planning.preflight import preflight
from tests.planning.configs import rl, role, sft


def check(paths, parallel, name="checked", **changes):
    """Architecture and layout of a role whose model has `changes`, on one data-parallel rank."""
    actor = sft(paths, model=paths["make"](name, **changes), parallel=parallel).actor
    return check_role("actor", actor, math.prod(parallel.get(axis, 1) for axis in ("tp", "pp", "ep")))


@pytest.mark.parametrize(
    "changes, tp, words",
    [
        ({}, 8, "actor.parallel.tp = 8 does not divide the 12 attention heads of {path}; choose one of 1, 2, 4"),
        ({}, 3, "actor.parallel.tp = 3 does not divide the 4 KV heads of {path}; choose one of 1, 2, 4"),
        (
            {"intermediate_size": 90},
            4,
            "actor.parallel.tp = 4 does not divide the 90 MLP width of {path}; choose one of 1, 2",
        ),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            2,
            "divide the 5 attention heads of {path}; choose one of 1, 5",
        ),
    ],
)
def test_tp_that_does_not_divide_the_model_is_refused_with_what_would(paths, changes, tp, words):
    """Every advised number divides heads, KV heads and MLP alike."""
    with pytest.raises(ValueError, match="does not divide") as raised:
        check(paths, {"tp": tp}, "other", **changes)
    assert str(raised.value).endswith(words.format(path=paths["root"] / "other"))


@pytest.mark.parametrize("tp, legal", [(2, True), (4, True), (6, False), (12, False)])
def test_ranks_may_share_a_kv_head_if_its_rows_can_be_cut(paths, tp, legal):
    """12 heads, 2 KV heads of 8 channels: (12 + 2 x 2) x 8 = 128 rows of QKV are cut by 4, not by 6 or 12."""
    sizes = {"num_key_value_heads": 2, "intermediate_size": 192}
    if legal:
        arch, layout = check(paths, {"tp": tp}, **sizes)
        assert (arch.num_kv_heads, layout.tp) == (2, tp)
        return
    with pytest.raises(ValueError, match=rf"tp = {tp} does not divide the 128 rows of QKV .*; choose one of 1, 2, 4$"):
        check(paths, {"tp": tp}, **sizes)


def test_a_mixture_of_experts_at_tp_needs_sequence_parallelism(paths):
    """And its experts' width counts, not that of a dense MLP which it does not have."""
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 24,
        "intermediate_size": 7,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    arch, _ = check(paths, {"tp": 4, "sequence_parallel": True}, **experts)
    assert (arch.num_experts, arch.expert_ffn_size) == (4, 24)
    for name, changes, parallel, words in (
        ("a", {}, {"tp": 2, "sequence_parallel": False}, r"at tp = 2 needs sequence_parallel: true"),
        ("b", {"moe_intermediate_size": 6}, {"tp": 4, "sequence_parallel": True}, r"the 6 MLP width .* one of 1, 2$"),
        ("c", {"num_experts_per_tok": 1}, {}, r"one expert .* no gradient"),
        ("d", {"num_experts": 6}, {"ep": 4}, r"ep = 4 does not divide the 6 experts; choose one of 1, 2, 3, 6$"),
    ):
        with pytest.raises(ValueError, match=words):
            check(paths, parallel, name, **{**experts, **changes})


def test_a_load_balancing_loss_is_of_experts_and_its_words_are_read(paths):
    """A coefficient for a model without experts is refused, 0 is not; what config.json says wrongly is named."""
    dense = sft(paths).actor
    check_role("actor", dense.model_copy(update={"router_aux_loss_coef": 0.0}), 1)
    with pytest.raises(ValueError, match=r"actor\.router_aux_loss_coef = 0.01, but the model has no experts"):
        check_role("actor", dense.model_copy(update={"router_aux_loss_coef": 0.01}), 1)
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    for name, changes, words in (
        ("e", {"output_router_logits": "yes"}, "output_router_logits = 'yes', expected true or false"),
        ("f", {"output_router_logits": True, "router_aux_loss_coef": -1}, "router_aux_loss_coef = -1, expected a num"),
    ):
        with pytest.raises(ValueError, match=words):
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


@pytest.mark.parametrize(
    "parallel, world, words",
    [
        ({"pp": 4}, 4, ["actor.parallel: 6 layers do not divide by pp = 4", "layers_per_stage"]),
        ({"pp": 2, "layers_per_stage": [4, 4]}, 2, ["actor.parallel: layers_per_stage = [4, 4]", "6 layers", "8"]),
        (
            {"pp": 2, "vpp": 2},
            2,
            ["actor.parallel: 6 layers do not divide by pp x vpp = 2 x 2 = 4", "layers_per_stage"],
        ),
        ({"tp": 2, "pp": 2}, 6, ["actor.parallel: world size 6", "2 x 1 x 2 = 4", "use 4 or 8 ranks"]),
        ({"tp": 4}, 2, ["actor.parallel: world size 2", "4 x 1 x 1 = 4", "use 4 ranks"]),
        ({"ep": 2}, 1, ["actor.parallel.ep = 2 does not divide", "ranks in multiples of 2"]),
        ({"ep": 2}, 2, ["actor.parallel.ep = 2, but the model has no experts", "leave ep at 1"]),
        ({"tp": 2, "cp": 2, "pp": 3}, 18, ["tp x cp x pp = 2 x 2 x 3 = 12", "use 12 or 24 ranks"]),
        ({"cp": 4}, 2, ["world size 2 is not a multiple of tp x cp x pp = 1 x 4 x 1 = 4; use 4 ranks"]),
    ],
)
def test_stages_and_worlds_that_do_not_fit(paths, parallel, world, words):
    with pytest.raises(ValueError, match=r"^actor\.parallel") as raised:
        preflight("sft", sft(paths, parallel=parallel), world)
    assert [word for word in words if word not in str(raised.value)] == [], raised.value


def test_context_parallel_ranks_are_said(paths):
    """Of twelve ranks at tp 2 x cp 3 two are data-parallel; nothing but the world has to divide by cp."""
    _, layout = check_role("actor", sft(paths, parallel={"tp": 2, "cp": 3}).actor, 12)
    assert str(layout) == "tp 2 x cp 3 x pp 1 x dp 2"
    assert layout.groups(["cp"])[:2] == [(0, 2, 4), (1, 3, 5)]


def test_uneven_stages_that_add_up_are_legal(paths):
    """The stages in the middle may differ too."""
    for layers in ([1, 2, 2, 1], [1, 3, 1, 1]):
        assert preflight("sft", sft(paths, parallel={"pp": 4, "layers_per_stage": layers}), 4).numbers


def test_virtual_stages_are_told(paths):
    for parallel in ({"pp": 2, "vpp": 3}, {"pp": 2, "vpp": 2, "layers_per_stage": [1, 2, 2, 1]}):
        ((_, _, layout),) = preflight("sft", sft(paths, parallel=parallel), 4).roles
        assert layout == f"tp 1 x pp 2 x dp 2, vpp {parallel['vpp']} = 4 ranks"


def test_each_role_is_checked(paths):
    """The critic's own model does not have the actor's heads."""
    odd = paths["make"]("odd", num_attention_heads=3, num_key_value_heads=3)
    cfg = rl(paths, actor=role(paths, tp=2), critic=role(paths, model=odd, tp=2))
    with pytest.raises(ValueError, match=r"critic\.parallel\.tp = 2 does not divide the 3 attention heads"):
        preflight("rl", cfg, 2)
