"""Facts read from config.json, in both styles that transformers has written."""

import math

import pytest

from megarlhf.architectures.architecture import Architecture, Llama3Rope, YarnRope
from megarlhf.architectures.families import FAMILIES
from megarlhf.architectures.hf_config import architecture_from_hf
from tests.refuses import missing_names, refuses
from tests.weights.cases import TINY, tiny, transformers_config
from tests.weights.families import CONFIGS, architecture, config

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}  # fmt: skip
EXPECTED_ROPE = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def test_a_directory_written_by_transformers(tmp_path):
    transformers_config(
        head_dim=24, rms_norm_eps=1e-5, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ).save_pretrained(tmp_path)
    assert architecture_from_hf(tmp_path) == Architecture(
        model_type="llama", num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=24, ffn_size=96,
        vocab_size=100, max_positions=128, norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, tied_embeddings=True,
        qkv_bias=True, output_bias=True, mlp_bias=True, activation="silu",
    )  # fmt: skip


def test_old_and_new_rotary_styles_agree():
    old = tiny(rope_theta=500000.0, rope_scaling=LLAMA3)
    new = tiny(rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    assert old == new
    assert old.rope_theta == 500000.0
    assert old.rope_scaling == EXPECTED_ROPE
    assert tiny(rope_theta=7.0, rope_scaling=None).rope_theta == 7.0


def test_defaults_of_old_configs():
    """Before num_key_value_heads and head_dim existed: as many KV heads as heads, hidden / heads channels."""
    config = {key: value for key, value in TINY.items() if key not in ("num_key_value_heads", "hidden_act")}
    arch = architecture_from_hf(config)
    assert (arch.num_kv_heads, arch.head_dim, arch.activation) == (4, 16, "silu")
    assert (arch.tied_embeddings, arch.qkv_bias, arch.mlp_bias) == (False, False, False)


@pytest.mark.parametrize("changes, names", [
    ({"model_type": "lama"}, "'lama'|llama, mistral"), ({"hidden_act": "gelu"}, "hidden_act 'gelu'|silu"),
    ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope type 'ntk'|default, linear, dynamic, yarn, longrope"),
    ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn'|without factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor = 0.5|1 or more"),
    ({"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 32}},
     "max_position_embeddings = 128|'yarn'|32 x 2 = 64|vLLM's"),
    ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}, "truncate = 1|true or false"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2, "alpha": 9.0}}, "alpha = 9.0|vLLM"),
    ({"rope_scaling": {"type": "longrope", "factor": 2}}, "'longrope'|short_factor, long_factor"),
    ({"rope_scaling": {**LONGROPE, "short_factor": [1.0]}}, "short_factor|1 numbers|8"),
    ({"rope_scaling": {**LONGROPE, "factor": 3.0}}, "factor = 3.0|4"),
    ({"rope_scaling": {**LONGROPE, "long_mscale": 2.0}}, "long_mscale = 2.0|1.18322"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor, high_freq_factor"),
    ({"num_key_value_heads": 3}, "= 4|num_key_value_heads = 3"), ({"hidden_size": 65}, "head_dim|hidden size 65"),
    ({"num_hidden_layers": 0}, "num_hidden_layers = 0|positive integer"), ({"vocab_size": None}, "vocab_size = None"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config|'fp8'"),
])  # fmt: skip
def test_what_would_be_computed_wrongly_is_refused(changes, names):
    with refuses(*names.split("|")):
        tiny(**changes)


WINDOW = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4, "layer_types": None}
"""A window that no layer of four uses, as in QwQ-32B's first config.json; Qwen3-MoE reads no max_window_layers."""

REFUSED = [
    ("mistral", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, "'full_attention' for 1 of 4|alike"),
    ("mistral", {"layer_types": ["full_attention"] * 4}, "'full_attention' for 4 of 4|sliding_window = 7"),
    ("phi3", {"layer_types": ["full_attention"] * 4}, "'full_attention' for 4 of 4|sliding_window = 7"),
    ("mistral", {"sliding_window": 0}, "sliding_window = 0|positive integer"),
    ("qwen2", {**WINDOW, "max_window_layers": 3}, "max_window_layers = 3|layers 3 to 3|whose layers have none|qwen2"),
    ("qwen2", {**WINDOW, "max_window_layers": None}, "max_window_layers = None"),
    ("qwen2", {**WINDOW, "use_sliding_window": "yes"}, "use_sliding_window = 'yes'"),
    ("qwen2", {"layer_types": ["full_attention"] * 3}, "3 entries in layer_types|4 layers (num_hidden_layers)|correct"),
    ("qwen3", {**WINDOW, "max_window_layers": 0}, "sliding_window = 64|layers 0 to 3"),
    ("qwen3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "'sliding_attention' for 1 of 4"),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "attention in chunks"),
    ("qwen3", {"attention_bias": "yes"}, "attention_bias = 'yes'|true or false"),
    ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ("qwen3", {"rms_norm_eps": 0}, "rms_norm_eps = 0|positive number"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False"),
    ("gpt2", {"add_cross_attention": True}, "no cross attention"),
    ("gpt2", {"activation_function": "swish"}, "activation_function 'swish'|gelu_new"),
    ("gpt2", {"n_head": 5}, "hidden size 64|5 attention heads"),
    ("gpt2", {"n_embd": None}, "n_embd = None|positive integer"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim = 32"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False|opt-350m"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm = True"),
    ("opt", {"enable_bias": False}, "enable_bias = False"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = False"),
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5|num_local_experts = 4"),
    ("mixtral", {"num_local_experts": None}, "num_local_experts = None"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "no shared experts"),
    ("qwen3_moe", WINDOW, "use_sliding_window|a window on all layers"),
    ("phi3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn'|default, longrope"),
    ("phi3", {"attention_bias": True}, "attention_bias = True"),
    ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "0.2|heads of 16|3 channels|even"),
]  # fmt: skip


@pytest.mark.parametrize("name, changes, names", REFUSED)
def test_what_a_family_does_not_support_is_refused(name, changes, names):
    stated = config(name).to_dict()
    assert architecture_from_hf(stated) == architecture(name)
    with refuses(*names.split("|")):
        architecture_from_hf({**stated, **changes})


@pytest.mark.parametrize("name, changes", [
    ("qwen2", WINDOW), ("qwen3", WINDOW), ("qwen2", {**WINDOW, "max_window_layers": 9}),
    ("qwen2", {**WINDOW, "max_window_layers": 2, "layer_types": ["full_attention"] * 4}),
    ("qwen2", {**WINDOW, "max_window_layers": 2, "sliding_window": None}),
    ("qwen3_moe", {**WINDOW, "sliding_window": None}), ("mistral_whole", {"layer_types": ["full_attention"] * 4}),
    ("mistral", {"layer_types": ["sliding_attention"] * 4}), ("llama", {"sliding_window": 64}),
])  # fmt: skip
def test_a_window_that_no_layer_has_is_none(name, changes):
    """As in transformers: what it makes of the file, layer for layer, is what the architecture says."""
    stated = {**config(name).to_dict(), **changes}
    read = architecture_from_hf(stated)
    assert read == architecture(name)
    theirs = type(config(name))(**stated)
    types = {"qwen2": getattr(theirs, "layer_types", None), "qwen3": getattr(theirs, "layer_types", None)}
    if types.get(read.model_type) is not None:
        assert set(types[read.model_type]) == {"full_attention"}
    elif name != "llama":  # transformers' Llama never looks at the key
        assert theirs.sliding_window == read.sliding_window


def test_every_family_refuses_quantized_weights():
    for name in CONFIGS:
        with pytest.raises(ValueError, match="quantization_config"):
            architecture_from_hf({**config(name).to_dict(), "quantization_config": {"quant_method": "gptq"}})


GPT2_FILE = {
    "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768,
    "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
"""What the hub's gpt2 says, as far as it matters."""


def test_a_gpt2_file():
    """tie_word_embeddings and n_inner are absent: tied, four times the width."""
    expected = Architecture(
        model_type="gpt2", num_layers=12, hidden_size=768, num_heads=12, num_kv_heads=12, head_dim=64, ffn_size=3072,
        vocab_size=50257, max_positions=1024, norm_eps=1e-5, rope_theta=0.0, rope_scaling=None, tied_embeddings=True,
        qkv_bias=True, output_bias=True, mlp_bias=True, activation="gelu_new", gated_mlp=False, norm="layer",
        positions="learned",
    )  # fmt: skip
    assert architecture_from_hf(GPT2_FILE) == expected
    assert architecture_from_hf({**GPT2_FILE, "n_inner": None}) == expected
    assert architecture_from_hf({**GPT2_FILE, "n_inner": 100}).ffn_size == 100


def test_switches_of_the_families():
    opt = architecture("opt")
    assert (opt.position_offset, opt.norm, opt.norm_eps, opt.activation, opt.tied_embeddings) == (
        2, "layer", 1e-5, "relu", True,
    )  # fmt: skip
    assert (architecture("mistral").sliding_window, architecture("mistral_whole").sliding_window) == (7, None)
    qwen2, qwen3, biased = architecture("qwen2"), architecture("qwen3"), architecture("qwen3_biases")
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, 16)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 32)
    assert (biased.qkv_bias, biased.output_bias) == (True, True)
    mixtral, moe = architecture("mixtral"), architecture("qwen3_moe")
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.expert_ffn_size) == (4, 2, 96)
    assert (moe.num_experts, moe.experts_per_token, moe.expert_ffn_size, moe.ffn_size) == (4, 2, 40, 96)
    assert (mixtral.renormalize_experts, moe.renormalize_experts) == (True, True)
    assert not architecture("qwen3_moe", norm_topk_prob=False).renormalize_experts
    assert mixtral.rope_theta == 1e6
    assert not {a.num_experts for a in (opt, qwen2, qwen3)} - {0}


def test_keys_that_files_may_lack():
    """Defaults are those of transformers; the older name of Qwen3-MoE's number of experts is read too."""
    mistral = {k: v for k, v in config("mistral").to_dict().items() if k != "sliding_window"}
    assert architecture_from_hf(mistral).sliding_window == 4096
    qwen3 = {k: v for k, v in config("qwen3").to_dict().items() if k != "head_dim"}
    assert architecture_from_hf(qwen3).head_dim == 128
    moe = config("qwen3_moe").to_dict()
    count = moe.pop("num_local_experts")
    assert architecture_from_hf({**moe, "num_experts": count}) == architecture("qwen3_moe")


def test_directory_errors(tmp_path):
    for text, fault in ((None, "does not exist"), ("{", "not JSON"), ("[1]", "a list")):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with refuses("config.json", fault):
            architecture_from_hf(tmp_path)


def test_the_known_types():
    known = {"llama", "mistral", "qwen2", "qwen3", "gpt2", "opt", "mixtral", "qwen3_moe", "phi3"}
    assert FAMILIES.keys() >= known
    assert all(family.model_type == name for name, family in FAMILIES.items())


def test_a_rope_scaling_beside_rope_parameters_replaces_them():
    """As transformers 5 reads it: a published recipe for long texts adds `rope_scaling` to a file that has both."""
    from transformers import LlamaConfig

    config = {**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    with refuses("rope type 'yarn'", "factor"):
        architecture_from_hf({**config, "rope_scaling": {"type": "yarn"}})
    both = {**config, "rope_scaling": {**LLAMA3, "rope_theta": 500.0}}
    read = LlamaConfig(**{key: value for key, value in both.items() if key != "model_type"}).rope_parameters
    arch = architecture_from_hf(both)
    assert (arch.rope_scaling, arch.rope_theta) == (EXPECTED_ROPE, 500.0)
    assert (read["rope_type"], read["rope_theta"]) == ("llama3", 500.0)


def test_a_published_recipe_of_yarn():
    """Qwen2.5's for long texts: the attention factor is 0.1 ln 4 + 1, the bounds are the paper's."""
    arch = tiny(rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"})
    expected = {"factor": 4.0, "original_max_positions": 32, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    assert arch.rope_scaling == YarnRope(**expected, attention_factor=1.1386294361119891)
    stated = {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    assert tiny(rope_scaling=stated).rope_scaling.attention_factor == pytest.approx(1.13862943611 / 1.06931471806)
    # The original length is that of the model where nobody says it, and the outer of two, as in transformers.
    assert tiny(rope_scaling=stated).rope_scaling.original_max_positions == 128
    both = {"rope_scaling": {**stated, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 96}
    assert tiny(**both).rope_scaling.original_max_positions == 96


def test_sequences_end_where_transformers_and_vllm_part():
    """LongRoPE at the original length, dynamic NTK at the model's; "su" is LongRoPE's older name."""
    long, dynamic = (
        tiny(rope_scaling=scaling) for scaling in ({**LONGROPE, "rope_type": "su"}, {"type": "dynamic", "factor": 2})
    )
    assert (long.max_positions, long.longest_sequence, dynamic.longest_sequence) == (128, 32, 128)
    assert long.rope_scaling.attention_factor == pytest.approx((1 + math.log(4) / math.log(32)) ** 0.5)
    assert not missing_names(long.limit_of_sequences, "vLLM", "32")
    assert not missing_names(dynamic.limit_of_sequences, "vLLM", "128")
    assert tiny().limit_of_sequences == "max_position_embeddings = 128"


def test_a_phi_4_mini_file():
    """What the hub's says, as far as it matters: three quarters of a head are turned, up to 4096 tokens."""
    rope = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
    stated = {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05,
        "rope_scaling": rope, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
        "attention_bias": False, "vocab_size": 200064,
    }  # fmt: skip
    arch = architecture_from_hf(stated)
    assert (arch.head_dim, arch.rotary_dim, arch.longest_sequence, arch.tied_embeddings) == (128, 96, 4096, True)
    assert arch.rope_scaling.attention_factor == pytest.approx(1.1902380714238083)  # sqrt(1 + ln 32 / ln 4096)
