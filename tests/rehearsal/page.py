"""Prints the tables of docs/rehearsal-gpu.md: `python -m tests.rehearsal.page`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megarlhf.architectures.architecture import Architecture
from megarlhf.rehearsal.transformer_engine.replace import LOCAL, TE, Saved, saved_tensors

WORDS = {
    "rms": "RMSNorm",
    "layer_norm": "LayerNorm",
    "turned": "q, k turned or copied",
    "interleaved": "q, k as the product leaves them",
    "qk_norm": "norms of q, k",
    "dense": "dense",
    "experts": "experts",
    "gated": "gated",
    "gelu": "GELU",
}
EXAMPLES = (
    ("llama-3-70b", 8, True),
    ("llama-3-70b", 8, False),
    ("qwen3-8b", 2, True),
    ("gpt2-xl", 1, False),
    ("opt", 2, True),
)


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
