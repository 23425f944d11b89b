"""TransformerEngine's layers, which cannot be imported without CUDA: a table of what they keep for the backward, with its
sources, and the exchange of a rehearsed model's layers for stand-ins that keep just that (`te_layers.py`).

The table is of version 2.11.0, which requirements/gpu.txt pins; 2.9 and 2.10 save the same tensors. Paths of sources are
those of TransformerEngine's repository below `transformer_engine/pytorch/` and of the installed Megatron-Core 0.16.1 below
`megatron/core/`. A model keeps the parameter names of the local spec: shapes and sum are those of the other, and the
architecture's table, the resharder and the module agree.

Legend of sizes, all of one rank: T tokens of a micro-batch, t this rank's stretch of them (T / tp under sequence
parallelism, otherwise T), H hidden, N query heads, G key-value groups, D head dimension, F width of the MLP; of one
expert K rows that are routed to it and E its width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megarlhf.architectures.architecture import Architecture
from megarlhf.models.build import ModelShard
from megarlhf.models.elementwise import SiluGate
from megarlhf.rehearsal.te_layers import Attention, FoldedNorm, Gate, Linear, Norm, NormLinear, Shared

VERSION = "2.11.0"
Layers = Literal["te", "local"]
"""Whose layers a rehearsed GPU holds. `local`: machines without TransformerEngine."""
Trait = Literal["rms", "layer_norm", "turned", "interleaved", "qk_norm", "dense", "experts", "gated", "gelu"]
BYTES = {"model": 2, "fp32": 4, "int64": 8}
"""The table is for models in bf16."""


@dataclass(frozen=True)
class Saved:
    """One tensor that a layer keeps from its forward to its backward."""

    module: str
    tensor: str
    dims: tuple[str | int, ...]
    """Sizes by the legend."""
    source: str
    dtype: Literal["model", "fp32", "int64"] = "model"
    only: frozenset[Trait] = frozenset()
    """What a layer must have for it."""
    held_by: str = ""
    """Another entry whose storage this is; then it is not counted."""

    @property
    def formula(self) -> str:
        return " ".join([str(BYTES[self.dtype]), *map(str, self.dims)])

    def nbytes(self, sizes: dict[str, int]) -> int:
        if self.held_by:
            return 0
        return BYTES[self.dtype] * math.prod(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)


def _only(*traits: Trait) -> frozenset[Trait]:
    return frozenset(traits)


_LNL, _LINEAR = "module/layernorm_linear.py", "module/linear.py"
_FUSED = "attention/dot_product_attention"
_MLP = "megatron/core/transformer/mlp.py"


def _norm_linear(place: str, *traits: Trait) -> tuple[Saved, ...]:
    return (
        Saved(place, "inputmat, the layer's input", ("t", "H"), f"{_LNL}:466", only=_only(*traits)),
        Saved(place, "ln_out, gathered again in the backward", ("t", "H"), f"{_LNL}:466, 688", only=_only(*traits)),
        Saved(place, "rsigma", ("t",), "csrc/extensions/normalization.cpp:318", "fp32", _only(*traits)),
        Saved(place, "mu", ("t",), "csrc/extensions/normalization.cpp:87", "fp32", _only("layer_norm", *traits)),
    )


def _mlp(place: str, rows: str, width: str, kind: Trait) -> tuple[Saved, ...]:
    gated, gelu = _only(kind, "gated"), _only(kind, "gelu")
    return (
        Saved(f"{place} silu", "the first product, [gate, up]", (rows, 2, width), f"{_MLP}:224", only=gated),
        Saved(f"{place} gate", "silu(gate)", (rows, width), f"{_MLP}:224", only=gated),
        Saved(f"{place} gate", "up + 0", (rows, width), f"{_MLP}:225", only=gated),
        Saved(f"{place} gelu", "the first product, with its bias", (rows, width), f"{_MLP}:230", only=gelu),
    )


TE: tuple[Saved, ...] = (
    *_norm_linear("qkv LayerNormLinear"),
    Saved("q, k norms", "query", ("T", "N", "D"), "ops/basic/rmsnorm.py:202", only=_only("qk_norm")),
    Saved("q, k norms", "key", ("T", "G", "D"), "ops/basic/rmsnorm.py:202", only=_only("qk_norm")),
    Saved("q, k norms", "rstdevs", ("T", "N"), "ops/basic/rmsnorm.py:202", "fp32", _only("qk_norm")),
    Saved("q, k norms", "rstdevs", ("T", "G"), "ops/basic/rmsnorm.py:202", "fp32", _only("qk_norm")),
    Saved("FusedAttention", "query", ("T", "N", "D"), f"{_FUSED}/backends.py:1323", only=_only("turned")),
    Saved("FusedAttention", "key", ("T", "G", "D"), f"{_FUSED}/backends.py:1323", only=_only("turned")),
    Saved("FusedAttention", "value, made contiguous", ("T", "G", "D"), f"{_FUSED}/utils.py:2020", only=_only("turned")),
    Saved("FusedAttention", "the product qkv", ("T", 3, "N", "D"), f"{_FUSED}/utils.py:1980", only=_only("interleaved")),
    Saved("FusedAttention", "output", ("T", "N", "D"), f"{_FUSED}/backends.py:1323"),
    Saved("FusedAttention", "softmax statistics", ("T", "N"), "../common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu:1121", "fp32"),
    Saved("FusedAttention", "rng_state", (2,), "csrc/extensions/attention.cpp:219", "int64"),
    Saved("proj Linear", "inputmat", ("T", "N", "D"), f"{_LINEAR}:404", held_by="FusedAttention output"),
    *_norm_linear("fc1 LayerNormLinear", "dense"),
    *_mlp("MLP", "T", "F", "dense"),
    Saved("fc2 Linear", "inputmat", ("T", "F"), f"{_LINEAR}:404", only=_only("dense")),
    Saved("norm before experts", "input", ("t", "H"), "ops/basic/rmsnorm.py:202", only=_only("experts")),
    Saved("norm before experts", "rstdevs", ("t",), "ops/basic/rmsnorm.py:202", "fp32", _only("experts")),
    Saved("expert fc1 Linear", "inputmat", ("K", "H"), f"{_LINEAR}:404", only=_only("experts"), held_by="the dispatcher's rows"),
    *_mlp("expert", "K", "E", "experts"),
    Saved("expert", "gate's output, to be weighted", ("K", "E"), "megatron/core/transformer/mlp.py:234", only=_only("experts")),
    Saved("expert fc2 Linear", "inputmat", ("K", "E"), f"{_LINEAR}:404", only=_only("experts")),
)  # fmt: skip
"""What one layer with TransformerEngine's modules keeps. Router, dispatcher and the residual sums are Megatron-Core's own
code in both specs and are rehearsed as they are; the sums keep nothing, dropout being 0. Weights that are not trained
save neither `ln_out` nor `inputmat` of their products; without gradients nothing is kept."""


def _local_norm(place: str, *traits: Trait) -> tuple[Saved, ...]:
    rms, layer = _only("rms", *traits), _only("layer_norm", *traits)
    return (
        Saved(place, "input in fp32", ("t", "H"), "models/norm.py, RMSNorm", "fp32", rms),
        Saved(place, "1 / deviation", ("t",), "models/norm.py, RMSNorm", "fp32", rms),
        Saved(place, "quotient", ("t", "H"), "models/norm.py, RMSNorm", only=rms),
        Saved(place, "input", ("t", "H"), "models/norm.py, LayerNorm", only=layer),
        Saved(place, "mean", ("t",), "models/norm.py, LayerNorm", "fp32", layer),
        Saved(place, "1 / deviation", ("t",), "models/norm.py, LayerNorm", "fp32", layer),
    )


_COLUMN = "megatron/core/tensor_parallel/layers.py:465"
_VARLEN = "torch/nn/attention/varlen.py:498"
LOCAL: tuple[Saved, ...] = (
    *_local_norm("norm"),
    Saved("qkv ColumnParallelLinear", "input", ("t", "H"), _COLUMN),
    Saved("varlen_attn", "query", ("T", "N", "D"), _VARLEN, only=_only("turned")),
    Saved("varlen_attn", "key", ("T", "G", "D"), _VARLEN, only=_only("turned")),
    Saved("varlen_attn", "the product qkv, for value", ("T", "N", "D"), _VARLEN),
    Saved("varlen_attn", "the product qkv, for value", ("T", 2, "G", "D"), _VARLEN),
    Saved("varlen_attn", "output", ("T", "N", "D"), _VARLEN),
    Saved("varlen_attn", "softmax statistics", ("T", "N"), _VARLEN, "fp32"),
    Saved("varlen_attn", "rng_state", (2,), _VARLEN, "int64"),
    Saved("proj RowParallelLinear", "input", ("T", "N", "D"), _COLUMN, held_by="varlen_attn output"),
    *_local_norm("norm", "dense"),
    Saved("fc1 ColumnParallelLinear", "input", ("t", "H"), _COLUMN, only=_only("dense")),
    Saved("SiluGate", "the first product, [gate, up]", ("T", 2, "F"), "models/elementwise.py, SiluGate", only=_only("dense", "gated")),
    Saved("gelu", "the first product, with its bias", ("T", "F"), f"{_MLP}:230", only=_only("dense", "gelu")),
    Saved("fc2 RowParallelLinear", "input", ("T", "F"), _COLUMN, only=_only("dense")),
)  # fmt: skip
"""The same of the local spec with packed rows, of dense layers without norms of queries and keys: to compare with."""


def traits_of(arch: Architecture) -> frozenset[Trait]:
    """What of the tables applies to a model's layers."""
    turned = arch.positions == "rope" or arch.qk_norm or arch.num_heads != arch.num_kv_heads
    traits: list[Trait] = ["rms" if arch.norm == "rms" else "layer_norm", "turned" if turned else "interleaved"]
    traits.append("experts" if arch.num_experts else "dense")
    if arch.qk_norm:
        traits.append("qk_norm")
    if arch.gated_mlp:
        traits.append("gated")
    elif arch.activation != "relu":  # whose backward needs the output only, which the next product keeps
        traits.append("gelu")
    return frozenset(traits)


def saved_tensors(
    table: Iterable[Saved],
    arch: Architecture,
    tokens: int,
    *,
    tp: int,
    sequence_parallel: bool,
    expert_rows: Sequence[int] = (),
) -> Iterator[tuple[Saved, int]]:
    """(entry, bytes) of each tensor that one layer keeps for `tokens` tokens; `expert_rows`: those that are routed to each
    expert."""
    sizes = {
        "T": tokens,
        "t": tokens // tp if sequence_parallel else tokens,
        "H": arch.hidden_size,
        "N": arch.num_heads // tp,
        "G": max(1, arch.num_kv_heads // tp),
        "D": arch.head_dim,
        "F": arch.ffn_size // tp,
        "E": arch.expert_ffn_size // tp,
    }
    traits = traits_of(arch)
    for entry in table:
        if entry.only <= traits:
            for rows in expert_rows if "K" in entry.dims else (0,):
                yield entry, entry.nbytes({**sizes, "K": rows})


# --- the exchange ---------------------------------------------------------------------------------


def replace_layers(shard: ModelShard, shared: Shared) -> None:
    """Put the stand-ins in place of the layers of a stage that was built with the local spec. Parameters, their names
    and their order stay."""
    assert shard.spec == "local", "this machine has TransformerEngine, and a rehearsal wants none of its modules"
    decoder: Any = shard.module.decoder
    for layer in decoder.layers:
        attention = layer.self_attention
        attention.linear_qkv = NormLinear(layer.input_layernorm, attention.linear_qkv, shared)
        layer.input_layernorm = FoldedNorm(layer.input_layernorm)
        if shard.arch.qk_norm:
            attention.q_layernorm, attention.k_layernorm = Norm(attention.q_layernorm), Norm(attention.k_layernorm)
        attention.core_attention = Attention(attention.core_attention)
        attention.linear_proj = Linear(attention.linear_proj, shared, by_rows=True)
        if shard.arch.num_experts:
            layer.pre_mlp_layernorm = Norm(layer.pre_mlp_layernorm)
            for expert in layer.mlp.experts.local_experts:
                _replace_mlp(expert, Linear(expert.linear_fc1, shared, by_rows=False), shared)
        else:
            _replace_mlp(layer.mlp, NormLinear(layer.pre_mlp_layernorm, layer.mlp.linear_fc1, shared), shared)
            layer.pre_mlp_layernorm = FoldedNorm(layer.pre_mlp_layernorm)
    if decoder.final_layernorm is not None:
        decoder.final_layernorm = Norm(decoder.final_layernorm)


def _replace_mlp(mlp: Any, first: Linear, shared: Shared) -> None:
    mlp.linear_fc1 = first
    if isinstance(mlp.activation_func, SiluGate):  # of the local spec only
        mlp.activation_func = Gate()
    mlp.linear_fc2 = Linear(mlp.linear_fc2, shared, by_rows=True)
