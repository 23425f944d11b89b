"""Facts read from config.json, in both styles that transformers has written."""

import json

import pytest

from megarlhf.weights.architecture import Architecture, Llama3Rope
from megarlhf.weights.tensor_map import MODEL_TYPES, TABLES
from tests.weights.cases import TINY, tiny, transformers_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
EXPECTED_ROPE = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def test_a_directory_written_by_transformers(tmp_path):
    """Every field against what was asked of transformers."""
    transformers_config(
        head_dim=24, rms_norm_eps=1e-5, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ).save_pretrained(tmp_path)
    assert Architecture.from_hf(tmp_path) == Architecture(
        model_type="llama",
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        ffn_size=96,
        vocab_size=100,
        max_positions=128,
        norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tied_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="silu",
    )


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
    arch = Architecture.from_hf(config)
    assert (arch.num_kv_heads, arch.head_dim, arch.activation) == (4, 16, "silu")
    assert (arch.tied_embeddings, arch.qkv_bias, arch.mlp_bias) == (False, False, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, r"'lama'; known: .*llama, mistral"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu'; supported for this model_type: silu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope type 'yarn'; supported: default, llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"without low_freq_factor, high_freq"),
        ({"num_key_value_heads": 3}, r"= 4, not a multiple of num_key_value_heads = 3"),
        ({"hidden_size": 65}, r"no head_dim, and its hidden size 65"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers = 0, expected a positive integer"),
        ({"vocab_size": None}, r"vocab_size = None"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \('fp8'\)"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_directory_errors(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        Architecture.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Architecture.from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="holds a list"):
        Architecture.from_hf(tmp_path)


def test_every_known_type_has_a_table():
    assert TABLES.keys() == MODEL_TYPES.keys()
