"""Tables of what layers keep for the backward, with sources: TransformerEngine's, and those of the local spec.

The stand-ins of `megarlhf/rehearsal/transformer_engine/layers.py` are held against the first, and docs/rehearsal-gpu.md
shows both: `python -m tests.rehearsal.saved_tensors` prints them. The table is of TransformerEngine 2.11.0.

Legend of sizes, all of one rank: T tokens of a micro-batch, t this rank's stretch of them (T / tp under sequence
parallelism, otherwise T), H hidden, N query heads, G key-value groups, D head dimension, F width of the MLP; of one
expert K rows that are routed to it and E its width.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megarlhf.architectures.architecture import Architecture

Trait = Literal["rms", "layer_norm", "turned", "interleaved", "qk_norm", "dense", "experts", "gated", "gelu"]
BYTES = {"model": 2, "fp32": 4, "int64": 8}
"""Bytes by dtype. The table is for models in bf16."""


@dataclass(frozen=True)
class Saved:
    """One tensor that a layer keeps from its forward to its backward."""

    module: str
    tensor: str
    dims: tuple[str | int, ...]
    """Sizes, by the legend."""
    source: str
    dtype: Literal["model", "fp32", "int64"] = "model"
    only: frozenset[Trait] = frozenset()
    """Traits of the layers that keep it."""
    held_by: str = ""
    """Another entry with the same storage; then it is not counted."""

    @property
    def formula(self) -> str:
        return " x ".join([f"{BYTES[self.dtype]} B", *map(str, self.dims)])

    def nbytes(self, sizes: dict[str, int]) -> int:
        if self.held_by:
            return 0
        return BYTES[self.dtype] * math.prod(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)


def _only(*traits: Trait) -> frozenset[Trait]:
    return frozenset(traits)


_QK, _TURNED, _INTERLEAVED = _only("qk_norm"), _only("turned"), _only("interleaved")
_DENSE, _EXPERTS = _only("dense"), _only("experts")

# Of TransformerEngine, below transformer_engine/
_LNL, _LINEAR, _NORM = (f"pytorch/{file}" for file in ("module/layernorm_linear.py", "module/linear.py", "ops/basic"))
_NORMS = "pytorch/csrc/extensions/normalization.cpp"
_FUSED, _LAYOUT = (f"pytorch/attention/dot_product_attention/{file}.py" for file in ("backends", "utils"))
_STATISTICS = "common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu:1121"
# Of Megatron-Core, below megatron/core/
_MLP, _COLUMN = "transformer/mlp.py", "tensor_parallel/layers.py:465"
_SWIGLU = "fusions/fused_bias_swiglu.py"
# Of ours, below megarlhf/, and of torch
_RMS, _LAYER, _GATE = "models/elementwise.py, rms_norm", "models/norm.py, LayerNorm", "models/elementwise.py, SiluGate"
_VARLEN = "torch/nn/attention/varlen.py:498"


def _norm_linear(place: str, *traits: Trait) -> tuple[Saved, ...]:
    return (
        Saved(place, "inputmat, the layer's input", ("t", "H"), f"{_LNL}:466", only=_only(*traits)),
        Saved(place, "ln_out, gathered again in the backward", ("t", "H"), f"{_LNL}:466, 688", only=_only(*traits)),
        Saved(place, "rsigma", ("t",), f"{_NORMS}:88, 318", "fp32", _only(*traits)),
        Saved(place, "mu", ("t",), f"{_NORMS}:87", "fp32", _only("layer_norm", *traits)),
    )


def _gate(place: str, rows: str, width: str, kind: Trait) -> tuple[Saved, ...]:
    source = f"{_SWIGLU}:{166 if kind == 'dense' else 196}"
    return (Saved(place, "the first product, [gate, up]", (rows, 2, width), source, only=_only(kind, "gated")),)


_GELU = Saved("gelu", "the first product, with its bias", ("T", "F"), f"{_MLP}:230", only=_only("dense", "gelu"))

TE: tuple[Saved, ...] = (
    *_norm_linear("qkv LayerNormLinear"),
    Saved("q, k norms", "query", ("T", "N", "D"), f"{_NORM}/rmsnorm.py:202", only=_QK),
    Saved("q, k norms", "key", ("T", "G", "D"), f"{_NORM}/rmsnorm.py:202", only=_QK),
    Saved("q, k norms", "rstdevs of queries", ("T", "N"), f"{_NORM}/rmsnorm.py:202", "fp32", _QK),
    Saved("q, k norms", "rstdevs of keys", ("T", "G"), f"{_NORM}/rmsnorm.py:202", "fp32", _QK),
    Saved("FusedAttention", "query", ("T", "N", "D"), f"{_FUSED}:1323", only=_TURNED),
    Saved("FusedAttention", "key", ("T", "G", "D"), f"{_FUSED}:1323", only=_TURNED),
    Saved("FusedAttention", "value, made contiguous", ("T", "G", "D"), f"{_LAYOUT}:2020", only=_TURNED),
    Saved("FusedAttention", "the product qkv", ("T", 3, "N", "D"), f"{_LAYOUT}:1980", only=_INTERLEAVED),
    Saved("FusedAttention", "output", ("T", "N", "D"), f"{_FUSED}:1323"),
    Saved("FusedAttention", "softmax statistics", ("T", "N"), _STATISTICS, "fp32"),
    Saved("FusedAttention", "rng_state", (2,), "pytorch/csrc/extensions/attention.cpp:219", "int64"),
    Saved("proj Linear", "inputmat", ("T", "N", "D"), f"{_LINEAR}:404", held_by="FusedAttention's output"),
    *_norm_linear("fc1 LayerNormLinear", "dense"),
    *_gate("MLP", "T", "F", "dense"),
    _GELU,
    Saved("fc2 Linear", "inputmat", ("T", "F"), f"{_LINEAR}:404", only=_DENSE),
    Saved("norm before experts", "input", ("t", "H"), f"{_NORM}/rmsnorm.py:202", only=_EXPERTS),
    Saved("norm before experts", "rstdevs", ("t",), f"{_NORM}/rmsnorm.py:202", "fp32", _EXPERTS),
    Saved("fc1 Linear of an expert", "inputmat", ("K", "H"), f"{_LINEAR}:404", only=_EXPERTS, held_by="the dispatcher"),
    *_gate("expert", "K", "E", "experts"),
    Saved("fc2 Linear of an expert", "inputmat", ("K", "E"), f"{_LINEAR}:404", only=_EXPERTS),
)
"""Tensors that one layer with TransformerEngine's modules keeps.

Router, dispatcher and the residual sums are Megatron-Core's own code in both specs and are rehearsed as they are; the
sums keep nothing, since dropout is 0. Weights that are not trained keep neither `ln_out` nor `inputmat` of their
products. Without gradients nothing is kept.
"""


def _local_rms(place: str, *traits: Trait, dims: tuple[str, ...] = ("t", "H"), held_by: str = "") -> tuple[Saved, ...]:
    only = _only("rms", *traits)
    return (
        Saved(place, "input", dims, _RMS, only=only, held_by=held_by),
        Saved(place, "1 / deviation", dims[:-1], _RMS, "fp32", only),
        Saved(place, "quotient", dims, _RMS, only=only),
    )


def _local_norm(place: str) -> tuple[Saved, ...]:
    only = _only("layer_norm")
    return (
        *_local_rms(place),
        Saved(place, "input", ("t", "H"), _LAYER, only=only),
        Saved(place, "mean", ("t",), _LAYER, "fp32", only),
        Saved(place, "1 / deviation", ("t",), _LAYER, "fp32", only),
    )


LOCAL: tuple[Saved, ...] = (
    *_local_norm("norm"),
    Saved("qkv ColumnParallelLinear", "input", ("t", "H"), _COLUMN),
    *_local_rms("q norm", "qk_norm", dims=("T", "N", "D")),
    *_local_rms("k norm", "qk_norm", dims=("T", "G", "D"), held_by="varlen_attn, as a part of the product qkv"),
    Saved("varlen_attn", "query", ("T", "N", "D"), _VARLEN, only=_TURNED),
    Saved("varlen_attn", "key", ("T", "G", "D"), _VARLEN, only=_TURNED),
    Saved("varlen_attn", "the product qkv, of which value is a part", ("T", "(N + 2 G)", "D"), _VARLEN),
    Saved("varlen_attn", "output", ("T", "N", "D"), _VARLEN),
    Saved("varlen_attn", "softmax statistics", ("T", "N"), _VARLEN, "fp32"),
    Saved("varlen_attn", "rng_state", (2,), _VARLEN, "int64"),
    Saved("proj RowParallelLinear", "input", ("T", "N", "D"), _COLUMN, held_by="varlen_attn's output"),
    *_local_norm("second norm"),
    Saved("fc1 ColumnParallelLinear", "input", ("t", "H"), _COLUMN, only=_DENSE),
    Saved("SiluGate", "the first product, [gate, up]", ("T", 2, "F"), _GATE, only=_only("dense", "gated")),
    _GELU,
    Saved("fc2 RowParallelLinear", "input", ("T", "F"), _COLUMN, only=_DENSE),
    Saved("fc1 of an expert", "input", ("K", "H"), _COLUMN, only=_EXPERTS, held_by="the dispatcher"),
    Saved("SiluGate of an expert", "the first product, [gate, up]", ("K", 2, "E"), _GATE, only=_EXPERTS),
    Saved("expert", "the gate's output, to be weighted", ("K", "E"), f"{_MLP}:169", only=_EXPERTS),
    Saved("fc2 of an expert", "input", ("K", "E"), _COLUMN, only=_EXPERTS),
)
"""Tensors that one layer of the local spec with packed rows keeps, for comparison. Nothing is made from it."""


def traits_of(arch: Architecture) -> frozenset[Trait]:
    """Traits of a model's layers, which select entries of the tables."""
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
    """(entry, bytes) of each tensor that one layer keeps for `tokens` tokens.

    expert_rows: numbers of tokens that are routed to each expert.
    """
    sizes = {
        "T": tokens,
        "t": tokens // tp if sequence_parallel else tokens,
        "H": arch.hidden_size,
        "N": arch.num_heads // tp,
        "G": max(1, arch.num_kv_heads // tp),
        "(N + 2 G)": arch.num_heads // tp + 2 * max(1, arch.num_kv_heads // tp),
        "D": arch.head_dim,
        "F": arch.ffn_size // tp,
        "E": arch.expert_ffn_size // tp,
    }
    traits = traits_of(arch)
    for entry in table:
        if entry.only <= traits:
            for rows in expert_rows if "K" in entry.dims else (0,):
                yield entry, entry.nbytes({**sizes, "K": rows})


# --- the page

WORDS = {
    "rms": "RMSNorm", "layer_norm": "LayerNorm", "turned": "q, k turned or copied",
    "interleaved": "q, k as the product leaves them", "qk_norm": "norms of q, k", "dense": "dense",
    "experts": "experts", "gated": "gated", "gelu": "GELU",
}  # fmt: skip
EXAMPLES = (
    ("llama-3-70b", 8, True), ("llama-3-70b", 8, False), ("qwen3-8b", 2, True), ("gpt2-xl", 1, False), ("opt", 2, True),
)  # fmt: skip


def rows(table: Iterable[Saved]) -> Iterator[str]:
    """A line for each entry, with its formula, its condition and its source."""
    for entry in table:
        only = ", ".join(WORDS[trait] for trait in sorted(entry.only))
        nbytes = f"0: kept by {entry.held_by}" if entry.held_by else entry.formula
        yield f"| {entry.module} | {entry.tensor} | {nbytes} | {only} | {entry.source} |"


def bytes_per_token(table: Iterable[Saved], arch: Architecture, tp: int, sequence_parallel: bool) -> float:
    tokens = 8192
    tensors = saved_tensors(table, arch, tokens, tp=tp, sequence_parallel=sequence_parallel)
    return sum(nbytes for entry, nbytes in tensors if entry.tensor != "rng_state") / tokens


def example(name: str, arch: Architecture, tp: int, sequence_parallel: bool) -> str:
    te, local = (bytes_per_token(table, arch, tp, sequence_parallel) for table in (TE, LOCAL))
    return f"| {name} | {tp} | {'yes' if sequence_parallel else 'no'} | {te:,.0f} | {local:,.0f} |"


if __name__ == "__main__":
    print("\n".join([*rows(TE), "", *rows(LOCAL)]))
