"""Megatron-LM's arguments of every family, and back. Not covered: arguments as Megatron-LM itself would parse and check
them (it is not installed)."""

from __future__ import annotations

import argparse
import logging
import math
from dataclasses import MISSING, fields, replace

import pytest
import torch

from megarlhf.architectures.architecture import Architecture, Llama3Rope, YarnRope
from megarlhf.architectures.config_spec import ConfigSpec
from megarlhf.architectures.entries import ATTENTION, GATED_MLP, INPUT_NORM, OUTPUT, QK_NORMS
from megarlhf.architectures.families import FAMILIES
from megarlhf.architectures.families.llama import FACTS, decoder
from megarlhf.architectures.families.llama import FAMILY as LLAMA
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import logical_tensors, padded_vocab_size
from megarlhf.architectures.table import Family
from megarlhf.weights.checkpoint.formats.megatron.args import (
    OWN_KEY,
    arch_of,
    args_of,
    contradictions,
    described_arch,
    layout_of,
)
from megarlhf.weights.checkpoint.formats.megatron.fields import DECIDING, NEUTRAL, READ_AS, decision
from megarlhf.weights.checkpoint.formats.megatron.infer import infer
from megarlhf.weights.checkpoint.formats.megatron.stored import stored_args
from megarlhf.weights.checkpoint.formats.megatron.unsupported import SUPPORTED, refuse_unsupported
from megarlhf.weights.checkpoint.formats.torch_file.archive import read_torch_file
from tests.refuses import missing_names, refuses
from tests.weights.families import CONFIGS, architecture

LAYOUT = MegatronLayout(tp=2, pp=2, padded_vocab=256)

SAYABLE = ["llama", "mistral", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied", "gpt2", "mixtral", "qwen3_moe"]

LLAMA_BY_HAND = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 8, "kv_channels": 128, "seq_length": 8192,
    "max_position_embeddings": 131072, "position_embedding_type": "rope", "rotary_base": 500000, "rotary_percent": 1.0,
    "use_rope_scaling": True, "rope_scaling_factor": 8.0, "normalization": "RMSNorm", "norm_epsilon": 1e-5,
    "swiglu": True, "add_bias_linear": False, "add_qkv_bias": False, "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 128256, "vocab_size": None, "num_experts": None, "window_size": None, "qk_layernorm": False,
}  # fmt: skip
"""What a Llama 3.1 8B run of Megatron-LM states."""

LLAMA_3_1_8B = Architecture(
    model_type="llama", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336,
    vocab_size=128256, max_positions=131072, norm_eps=1e-5, rope_theta=500000.0,
    rope_scaling=Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
    tied_embeddings=False, qkv_bias=False, output_bias=False, mlp_bias=False, activation="silu",
)  # fmt: skip


def register(monkeypatch, families: dict[str, Family]) -> None:
    for module in ("architectures.families", "weights.checkpoint.formats.megatron.infer"):
        monkeypatch.setattr(f"megarlhf.{module}.FAMILIES", families)


@pytest.mark.parametrize("family", CONFIGS)
def test_our_key_gives_every_architecture_back(family):
    arch = architecture(family)
    assert arch_of(args_of(arch, LAYOUT, torch.bfloat16)) == arch


@pytest.mark.parametrize("family", SAYABLE)
def test_without_our_key_the_switches_are_enough(family):
    arch = architecture(family)
    args = args_of(arch, LAYOUT, torch.bfloat16)
    del args[OWN_KEY]
    assert arch_of(args) == arch


def test_what_megatron_cannot_say_is_warned_of(caplog):
    lost = {
        "opt": "max_positions = 48, activation = 'relu', position_offset = 2",
        "qwen3_biases": "output_bias = True",
        "llama_biases": "rope_scaling = Llama3Rope(factor=4.0, low_freq_factor=2.0",
        "llama_yarn": "rope_scaling = YarnRope(factor=4.0, original_max_positions=16, beta_fast=8.0",
        "llama_linear": "rope_scaling = LinearRope(factor=4.0)",
        "llama_dynamic": "rope_scaling = DynamicRope(factor=4.0)",
        "phi3_longrope": "rope_scaling = LongRope(short_factor=(1.0, 1.25, 1.5, 1.75)",
    }
    for family in CONFIGS:
        caplog.clear()
        args_of(architecture(family), LAYOUT, torch.bfloat16)
        assert len(caplog.records) == (family in lost)
        assert lost.get(family, "") in caplog.text


def test_a_llama_by_hand(caplog):
    """A stated vocabulary wins over the padded one, which is otherwise taken with a warning."""
    assert arch_of(LLAMA_BY_HAND) == LLAMA_3_1_8B
    assert caplog.text.count("state no vocab_size") == 1
    caplog.clear()
    assert arch_of({**LLAMA_BY_HAND, "vocab_size": 128000}) == replace(LLAMA_3_1_8B, vocab_size=128000)
    assert not caplog.records
    layout = MegatronLayout(tp=4, pp=2, padded_vocab=128512)
    written = args_of(LLAMA_3_1_8B, layout, torch.bfloat16)
    assert {k: written[k] for k in LLAMA_BY_HAND if k not in ("seq_length", "vocab_size", "padded_vocab_size")} == {
        k: v for k, v in LLAMA_BY_HAND.items() if k not in ("seq_length", "vocab_size", "padded_vocab_size")
    }


def test_older_spellings():
    """From before `position_embedding_type`, `normalization` and `add_bias_linear`."""
    old = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32,
        "padded_vocab_size": 128, "layernorm_epsilon": 1e-6, "kv_channels": 16, "ffn_hidden_size": None,
    }  # fmt: skip
    arch = arch_of(old)
    assert (arch.model_type, arch.activation, arch.norm_eps, arch.ffn_size) == ("gpt2", "gelu_new", 1e-6, 256)
    assert (arch.qkv_bias, arch.tied_embeddings, arch.positions, arch.rope_theta) == (True, True, "learned", 0.0)
    new = {"use_rotary_position_embeddings": True, "normalization": "RMSNorm", "swiglu": True}
    assert arch_of({**old, **new, "disable_bias_linear": True}).model_type == "llama"
    assert arch_of({**old, **new}).mlp_bias
    assert arch_of({**old, "bias_gelu_fusion": False}).activation == "gelu"


@pytest.mark.parametrize("changes, names", [
    ({"apply_layernorm_1p": True, "rotary_interleaved": 1}, "rotary_interleaved = 1|apply_layernorm_1p = True"),
    ({"rotary_percent": 0.5, "qk_layernorm": True}, "rotary_percent = 0.5|qwen3"),
    ({"position_embedding_type": "yarn"}, "position_embedding_type = 'yarn'"),
    ({"normalization": "LayerNorm"}, "llama|normalization"), ({"swiglu": False}, "llama|swiglu"),
    ({"num_experts": 8, "moe_router_pre_softmax": True}, "num_experts = 8|mixtral|moe_router_pre_softmax"),
    ({"num_experts": 8, "moe_layer_freq": [0, 1]}, "moe_layer_freq = [0, 1]"),
    ({"qk_layernorm": True, "add_qkv_bias": True}, "qk_layernorm = True|qwen2"),
    ({"window_size": (7, 0), "qk_layernorm": True}, "window_size = (7, 0)|mistral"),
    ({"num_query_groups": 3}, "llama|refused|num_attention_heads = 32|num_key_value_heads = 3"),
    ({"num_experts": 8, "moe_router_topk": 9}, "mixtral|refused|num_experts_per_tok = 9|num_local_experts = 8"),
    ({"num_layers": None, "hidden_size": None}, "lack num_layers, hidden_size"),
    ({"vocab_size": 128257}, "vocab_size = 128257|padded_vocab_size = 128256"),
])  # fmt: skip
def test_what_fits_no_family_is_refused_by_name(changes, names):
    with refuses(*names.split("|")):
        arch_of({**LLAMA_BY_HAND, **changes})


def test_a_registered_family_is_recognised_without_further_code(monkeypatch, caplog):
    """Llama with norms of query and key heads and biases on q, k and v, which no family here is."""
    made_up = Family(
        model_type="made_up",
        config=ConfigSpec(
            lm_class="MadeUpForCausalLM",
            scalar_class="MadeUpForSequenceClassification",
            facts={**FACTS, "qkv_bias": True, "output_bias": False, "mlp_bias": False, "qk_norm": True},
        ),
        table=decoder(INPUT_NORM, *ATTENTION, OUTPUT, *QK_NORMS, *GATED_MLP),
    )
    args = {**LLAMA_BY_HAND, "qk_layernorm": True, "add_qkv_bias": True}
    with refuses("no known family"):
        arch_of(args)
    register(monkeypatch, {**FAMILIES, "made_up": made_up})
    caplog.clear()
    arch = arch_of(args)
    assert arch == replace(LLAMA_3_1_8B, model_type="made_up", qk_norm=True, qkv_bias=True)
    assert caplog.text.count("state no vocab_size") == 1, "once, not once per family"
    tensors = logical_tensors(arch)
    assert tensors["model.layers.31.self_attn.q_norm.weight"] == (128,)
    assert tensors["model.layers.31.self_attn.k_proj.bias"] == (1024,)
    again = args_of(arch, replace(LAYOUT, padded_vocab=128256), torch.bfloat16)
    del again[OWN_KEY]
    assert arch_of(again) == arch
    assert arch_of(LLAMA_BY_HAND) == LLAMA_3_1_8B


def test_the_dense_size_beside_experts():
    """Mixtral writes one size, the experts'; where a family states both, the dense one is kept."""
    args = {**LLAMA_BY_HAND, "num_experts": 8, "moe_ffn_hidden_size": 512}
    sizes = {"mixtral": (512, 512), "qwen3_moe": (14336, 512)}
    for family, qk_norm in (("mixtral", False), ("qwen3_moe", True)):
        arch = arch_of({**args, "qk_layernorm": qk_norm})
        assert (arch.model_type, arch.ffn_size, arch.expert_ffn_size) == (family, *sizes[family])


def test_opt_is_never_recognised(monkeypatch):
    """Its arguments are those of a GPT-2 with exact GELU, which Megatron-LM would compute; the offset is unsayable."""
    args = args_of(architecture("opt"), LAYOUT, torch.bfloat16)
    del args[OWN_KEY]
    arch = arch_of(args)
    assert (arch.model_type, arch.activation, arch.max_positions, arch.position_offset) == ("gpt2", "gelu", 50, 0)
    register(monkeypatch, {name: family for name, family in FAMILIES.items() if name != "gpt2"})
    with refuses("nearest is opt", "max_position_embeddings"):
        arch_of(args)


def test_every_field_that_differs_is_told_as_arguments(monkeypatch):
    """Of a family that has nothing as it should be; rotary numbers are told by `position_embedding_type`."""
    elsewhere = ("model_type", "rope_theta", "rope_scaling", "adapter")
    nothing = {field.name: -1 for field in fields(Architecture) if field.name not in elsewhere}
    spec = ConfigSpec(lm_class="", scalar_class="", facts=nothing)
    register(monkeypatch, {"nothing": replace(LLAMA, model_type="nothing", config=spec)})
    with refuses("nearest is nothing") as error:
        arch_of({**LLAMA_BY_HAND, "vocab_size": 128256})
    unsaid = {"seq_length", "rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor"}
    for key in LLAMA_BY_HAND.keys() - unsaid - {"vocab_size"}:
        assert f"{key} = {LLAMA_BY_HAND[key]!r}" in str(error.value)
        assert key in str(error.value).split("which differs in")[1]


def test_a_contradicted_key_of_ours_is_ignored(caplog):
    args = args_of(architecture("llama"), LAYOUT, torch.bfloat16)
    assert arch_of({**args, "window_size": None, "extra": 1}) == architecture("llama")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert arch_of({**args, "num_layers": 6}) == architecture("llama", num_hidden_layers=6)
    assert not missing_names(caplog.text, "num_layers = 6", "there 4")
    with refuses("megarlhf_architecture", "not readable"):
        arch_of({**args, OWN_KEY: {"rope_scaling": None, "model_type": "llama"}})


@pytest.mark.parametrize("arguments", [
    {"qk_l2_norm": True}, {"activation_func_clamp_value": 7.0}, {"glu_linear_offset": 1.0},
    {"layernorm_zero_centered_gamma": True}, {"linear_attention_freq": 4},
    {"experimental_attention_variant": "gated_delta_net"},
    {"mrope_section": [16, 24, 24]}, {"softmax_scale": 0.1}, {"heterogeneous_block_specs": True},
    {"moe_router_group_topk": 2}, {"moe_router_topk_limited_devices": 2}, {"moe_router_force_load_balancing": True},
    {"moe_router_load_balancing_type": "sinkhorn"},
    {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
    {"moe_router_load_balancing_type": "quantile_balancing"}, {"moe_router_force_biased": 0.1}, {"use_mup": True},
    {"moe_mlp_glu_interleave_size": 32}, {"moe_shared_expert_glu_interleave_size": 32}, {"rope_scaling": "yarn"},
    {"enable_mhc_connections": True}, {"window_size": 4}, {"moe_apply_probs_on_input": True},
])  # fmt: skip
def test_other_mathematics_is_refused(arguments):
    ((key, value),) = arguments.items()
    for args in (LLAMA_BY_HAND, args_of(architecture("llama"), LAYOUT, torch.bfloat16)):
        with refuses("no known family", f"{key} = {value!r}"):
            arch_of({**args, **arguments})


def test_defaults_of_megatron_core_are_understood():
    """Every field of its configuration that we judge, at the value of a run that says nothing of it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults = {f.name: f.default for f in fields(TransformerConfig) if f.default is not MISSING}
    assert len(defaults.keys() & SUPPORTED.keys()) > 25
    refuse_unsupported(defaults)


def test_every_field_of_megatron_core_is_decided():
    """Of the installed version, and each in one way."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {f.name for f in fields(TransformerConfig)}
    assert len(names) > 200
    assert [name for name in names if decision(name) is None] == [], "decide: read, refused or neutral (fields.py)"
    assert not NEUTRAL & (DECIDING | READ_AS.keys())
    newer = {"mhc_num_residual_streams": "neutral", "use_mup": "refused", "num_moe_experts": "read", "nonsense": None}
    assert {name: decision(name) for name in newer} == newer


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 8.0}
SWIFT = {**LLAMA_BY_HAND, "use_rope_scaling": False, "rotary_percent": 1.0, "max_position_embeddings": 131072}


def test_rotary_arguments_of_ms_swift():
    """By hand: its dict wins over Megatron's switch; its share over rotary_percent. What cannot be read is told."""
    arch = arch_of({**SWIFT, "rope_scaling": YARN})
    assert arch.rope_scaling == YarnRope(
        factor=4.0, original_max_positions=32768, beta_fast=8.0, beta_slow=1.0, truncate=True,
        attention_factor=0.1 * math.log(4) + 1,
    )  # fmt: skip
    assert contradictions(arch, {**SWIFT, "rope_scaling": YARN}) == []
    (other,) = contradictions(arch, {**SWIFT, "rope_scaling": {**YARN, "factor": 8.0}})
    assert not missing_names(other, "rope_scaling: config.json says", "'factor': 8.0")
    assert contradictions(arch, {**SWIFT, "rope_scaling": None}) == []
    (unread,) = contradictions(arch, {**SWIFT, "rope_scaling": {"rope_type": "mine"}})
    assert not missing_names(unread, "rope_scaling = {'rope_type': 'mine'}", "rope type 'mine'")
    with refuses("args have rope_scaling", "rope type 'mine'"):
        arch_of({**SWIFT, "rope_scaling": {"rope_type": "mine"}})
    plain = arch_of(SWIFT)
    (sparse,) = contradictions(plain, {"rope_scaling": YARN})  # ms-swift stores no sizes
    assert not missing_names(sparse, "rope_scaling: config.json says None", "'factor': 4.0")
    assert contradictions(arch, {"rope_scaling": YARN}) == []
    phi = architecture("phi3", partial_rotary_factor=0.5)
    args = {**args_of(phi, LAYOUT, torch.bfloat16), "rotary_percent": 1.0, "partial_rotary_factor": 0.5}
    del args[OWN_KEY]
    assert (contradictions(phi, args), infer(args, "phi3").rotary_share) == ([], 0.5)
    assert "rotary_share" in contradictions(phi, {**args, "partial_rotary_factor": 0.25})[0]


class Kind:
    """Stands for an enum of another package."""


def test_objects_among_the_arguments(tmp_path):
    """One that decides the model is refused where no config.json speaks for it; arguments that are one whole object are
    read by their attributes."""
    named = argparse.Namespace(**LLAMA_BY_HAND, bridge={"of": [Kind()]})
    path = tmp_path / "common.pt"
    torch.save({"args": named}, path)
    stored = stored_args(read_torch_file(path, foreign=True), path)
    assert stored.foreign() == {"bridge": f"{__name__}.Kind"}
    assert described_arch(stored) == LLAMA_3_1_8B
    named.position_embedding_type = Kind()
    torch.save({"args": named}, path)
    stored = stored_args(read_torch_file(path, foreign=True), path)
    with refuses(f"position_embedding_type is an object of {__name__}.Kind", "--reference-hf"):
        described_arch(stored)
    assert contradictions(LLAMA_3_1_8B, stored.values) == []
    whole = Kind()
    whole.__dict__.update(LLAMA_BY_HAND)
    torch.save({"args": whole}, path)
    assert described_arch(stored_args(read_torch_file(path, foreign=True), path)) == LLAMA_3_1_8B
    torch.save({"args": 7}, path)
    with refuses("common.pt", "args of type", "int"):
        stored_args(read_torch_file(path, foreign=True), path)


@pytest.mark.parametrize("vocab, padded, tp, multiple", [
    (258, 258, 1, 1), (257, 258, 1, 2), (100, 128, 1, 128), (100, 256, 2, 128), (100, 512, 2, 256), (100, 100, 4, 1),
])  # fmt: skip
def test_the_multiple_of_the_vocabulary(vocab, padded, tp, multiple):
    """The least that makes these rows; of 258 at tp 1 a later tp 2 makes 258, not 516."""
    layout = MegatronLayout(tp=tp, padded_vocab=padded)
    args = args_of(architecture("llama", vocab_size=vocab), layout, torch.bfloat16)
    assert args["make_vocab_size_divisible_by"] == multiple
    assert padded_vocab_size(vocab, tp, multiple) == padded


def test_layout_arguments_by_hand():
    arch = architecture("llama", num_hidden_layers=12)

    def args(**layout):
        return args_of(arch, MegatronLayout(**{"padded_vocab": 256, "tp": 2, **layout}), torch.bfloat16)

    even = args(pp=2, vpp=3, spec="te")
    assert (even["virtual_pipeline_model_parallel_size"], even["num_layers_per_virtual_pipeline_stage"]) == (3, 2)
    assert (even["tensor_model_parallel_size"], even["pipeline_model_parallel_size"], even["world_size"]) == (2, 2, 4)
    assert (even["params_dtype"], even["bf16"], even["fp16"]) == (torch.bfloat16, True, False)
    assert (even["padded_vocab_size"], even["make_vocab_size_divisible_by"], even["vocab_size"]) == (256, 128, 100)
    assert even["transformer_impl"] == "transformer_engine"
    assert args(padded_vocab=104)["make_vocab_size_divisible_by"] == 4
    ends = args(pp=3, layers_per_stage=(3, 5, 4))
    assert (ends["decoder_first_pipeline_num_layers"], ends["decoder_last_pipeline_num_layers"]) == (3, 4)
    assert ends["pipeline_model_parallel_layout"] is None
    free = args(pp=4, layers_per_stage=(3, 2, 4, 3))
    assert free["pipeline_model_parallel_layout"] == "Ettt|tt|tttt|tttL"
    assert free["decoder_first_pipeline_num_layers"] is None
    chunks = args(pp=2, vpp=2, layers_per_stage=(2, 3, 4, 3))
    assert chunks["pipeline_model_parallel_layout"] == "Ett|ttt|tttt|tttL"
    assert layout_of(chunks, 256).layers_per_stage == (2, 3, 4, 3)
