"""Llama (1 to 3.x): grouped-query attention, gated MLP, RMS norms, optional biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarlhf.architectures.config_spec import ConfigField, ConfigSpec, equal_heads, flag, number, one_of, positive
from megarlhf.architectures.entries import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    GATED_MLP,
    INPUT_NORM,
    LM_HEAD,
    MLP_BIASES,
    OUTPUT,
    OUTPUT_BIAS,
    SCALAR_HEAD,
)
from megarlhf.architectures.table import Entry, Family, Table

FACTS: Mapping[str, Any] = {
    "num_layers": ConfigField(name="num_hidden_layers", read=positive),
    "hidden_size": ConfigField(name="hidden_size", read=positive),
    "num_heads": ConfigField(name="num_attention_heads", read=positive),
    "num_kv_heads": ConfigField(name="num_key_value_heads", read=positive, default=lambda facts: facts["num_heads"]),
    "head_dim": ConfigField(name="head_dim", read=positive, default=equal_heads),
    "ffn_size": ConfigField(name="intermediate_size", read=positive),
    "vocab_size": ConfigField(name="vocab_size", read=positive),
    "max_positions": ConfigField(name="max_position_embeddings", read=positive),
    "norm_eps": ConfigField(name="rms_norm_eps", read=number, default=1e-6),
    "tied_embeddings": ConfigField(name="tie_word_embeddings", read=flag, default=False),
    "qkv_bias": ConfigField(name="attention_bias", read=flag, default=False),
    "output_bias": ConfigField(name="attention_bias", read=flag, default=False),
    "mlp_bias": ConfigField(name="mlp_bias", read=flag, default=False),
    "activation": ConfigField(name="hidden_act", read=one_of("silu"), default="silu"),
}
"""Entries that Llama's relatives share; a relative replaces some."""

RELATIVES_FACTS: Mapping[str, Any] = {**FACTS, "num_kv_heads": ConfigField(name="num_key_value_heads", read=positive)}
"""Where transformers' default for an absent number of KV heads is some model's own, not the number of heads."""

NO_BIASES: Mapping[str, Any] = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}


def decoder(*layer: Entry) -> Table:
    """A table with these entries in each layer and Llama's embedding, final norm and heads around them."""
    return Table(embedding=(EMBEDDING,), layer=layer, final=(FINAL_NORM,), lm_head=LM_HEAD, scalar_head=SCALAR_HEAD)


FAMILY = Family(
    model_type="llama",
    config=ConfigSpec(lm_class="LlamaForCausalLM", scalar_class="LlamaForSequenceClassification", facts=FACTS),
    table=decoder(INPUT_NORM, *ATTENTION, OUTPUT, OUTPUT_BIAS, *GATED_MLP, *MLP_BIASES),
)
