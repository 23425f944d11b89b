"""Attention over rows that share prompts, on this device against fp64 of the same rows without sharing.

    python -m tools.gpu_check.prompts --out FILE [--limit SECONDS] [--rehearse]

A value may be off by FACTOR times what the same rows without sharing are off in the same dtype, on the same device, or
by as many roundings of the largest. In bf16 and fp16 a GPU goes the merged way, by the kernels of torch's varlen_attn;
windows and fp32 go the plain one.

Legend: T tokens of the shared row, U of the unshared one, N query heads and G key-value groups, D head dimension.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check import FACTOR, results_of
from benchmarks.gpu_timing import Deadline
from megarlhf.models.attention.packed import packed_attention
from megarlhf.models.attention.tree import kernel_for
from megarlhf.parallel.packing.rows import ROOT, packed_row

Check = Callable[[], str | None]
ROUNDING = {torch.float32: 4e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HEADS = ((9, 3, 64), (8, 1, 64), (4, 4, 128), (6, 2, 80), (4, 2, 256))
"""(query heads, key-value groups, head dimension)."""


@dataclass(frozen=True)
class Row:
    """Segments of a row, each the root of a tree or the continuation of another."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    def sequences(self) -> list[list[int]]:
        """Each without sharing: the segments from its root to an end."""

        def way(n: int) -> list[int]:
            return [*(way(self.parents[n]) if self.parents[n] != ROOT else []), n]

        return [way(n) for n in range(len(self.lengths)) if n not in self.parents]

    def unshared(self) -> tuple[tuple[int, ...], Tensor, Tensor]:
        """Lengths of the sequences, which token each of theirs is [U], and whether it is the first such [U]."""
        starts = [0, *itertools.accumulate(self.lengths)]
        sequences = [[t for n in way for t in range(starts[n], starts[n + 1])] for way in self.sequences()]
        tokens = list(itertools.chain(*sequences))
        seen: set[int] = set()
        first = [not (t in seen or seen.add(t)) for t in tokens]  # type: ignore[func-returns-value]
        return tuple(map(len, sequences)), torch.tensor(tokens), torch.tensor(first)


ROWS = {
    "eight responses": Row((96, *[40] * 8), (-1, *[0] * 8)),
    "ragged": Row((70, 130, 9, 200, 33, 1, 90, 140, 17, 64, 5, 61), (-1, -1, -1, -1, 0, 0, 1, 1, 1, 3, 3, -1)),
    "one response": Row((130, 37), (-1, 0)),
    "one token": Row((60, 20, 70, 1, 1), (-1, -1, -1, 0, 2)),
    "three levels": Row((100, 50, 30, 80, 20, 10, 150, 4), (-1, -1, 0, 0, 1, 2, 2, 4)),
    "long": Row((1500, 900, 300, 500, 260, 129, 700, 40, 1), (-1, -1, 0, 0, 0, 0, 1, 1, 1)),
}


def checks(device: torch.device) -> Iterator[tuple[str, Check]]:
    """By name; on a CPU with one shape of heads and without the long row."""
    yield "which way", partial(_which_way, device)
    heads = HEADS if device.type == "cuda" else HEADS[:1]
    rows = [(name, row) for name, row in ROWS.items() if device.type == "cuda" or name != "long"]
    for (name, row), shape, dtype in itertools.product(rows, heads, ROUNDING):
        for window in (None, 50) if shape == heads[0] else (None,):
            about = f"{name}, {shape[0]} heads, {shape[1]} groups of {shape[2]}, {dtype}, window {window}"
            yield about.replace("torch.", ""), partial(_near_truth, device, row, shape, dtype, window)
    for dtype in ROUNDING:
        about = f"another response changes no bit, {dtype}".replace("torch.", "")
        yield about, partial(_nothing_crosses, device, ROWS["ragged"], heads[0], dtype)


def _which_way(device: torch.device) -> str | None:
    """In 16 bits the merged way, or the rest proves nothing of it."""
    kernel, why = kernel_for(device.type, torch.bfloat16, 64, None)
    return None if kernel is not None else f"attention over shared prompts goes the plain way: {why}"


Numbers = dict[str, Tensor]
"""The output [T, N, D] and gradients [T, ...] in fp64, by name."""


def _near_truth(
    device: torch.device, row: Row, shape: tuple[int, int, int], dtype: torch.dtype, window: int | None
) -> str | None:
    given = _made(device, sum(row.lengths), shape, dtype)
    want = _of_unshared(row, [x.double() for x in given], window)
    their, our = _of_unshared(row, given, window), _of_shared(row, given, window)
    for name, truth in want.items():
        if not bool(our[name].isfinite().all()):
            return f"{name} is not finite"
        error, allowed = (float((x[name] - truth).abs().max()) for x in (our, their))
        if not error <= FACTOR * max(allowed, ROUNDING[dtype] * float(truth.abs().max())):
            return f"{name} is off by {error:.3g}, without sharing by {allowed:.3g}"
    return None


def _made(device: torch.device, tokens: int, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    heads, groups, size = shape
    generator = torch.Generator().manual_seed(tokens + heads)
    return [
        torch.randn(tokens, count, size, generator=generator).to(device, dtype)
        for count in (heads, groups, groups, heads)
    ]


def _of_shared(row: Row, given: Sequence[Tensor], window: int | None) -> Numbers:
    packed = packed_row(row.lengths, given[0].device, parents=row.parents)
    found = _with_gradients(partial(packed_attention, row=packed, scale=None, window=window), given)
    return {name: x.double() for name, x in found.items()}


def _of_unshared(row: Row, given: Sequence[Tensor], window: int | None) -> Numbers:
    """Each sequence with a prompt of its own. Outputs are those of a token's first copy, which alone has a gradient;
    gradients are summed over the copies in fp64."""
    lengths, token_U, first_U = row.unshared()
    token_U, first_U = token_U.to(given[0].device), first_U.to(given[0].device)
    *inputs, gradient = (x[token_U] for x in given)
    gradient = gradient * first_U[:, None, None]
    packed = packed_row(lengths, gradient.device)
    found = _with_gradients(partial(packed_attention, row=packed, scale=None, window=window), [*inputs, gradient])
    numbers = {"output": _rows(found.pop("output").double() * first_U[:, None, None], token_U, len(given[0]))}
    return numbers | {name: _rows(x.double(), token_U, len(given[0])) for name, x in found.items()}


def _rows(x_U: Tensor, token_U: Tensor, tokens: int) -> Tensor:
    """Sums over the copies of each token."""
    return x_U.new_zeros(tokens, *x_U.shape[1:]).index_add_(0, token_U, x_U)


def _with_gradients(attend: Callable[..., Tensor], given: Sequence[Tensor]) -> Numbers:
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    output = attend(*leaves)
    gradients = torch.autograd.grad(output, leaves, given[3])
    names = (f"gradient of {name}" for name in ("query", "key", "value"))
    return {"output": output.detach(), **dict(zip(names, gradients, strict=True))}


def _nothing_crosses(device: torch.device, row: Row, shape: tuple[int, int, int], dtype: torch.dtype) -> str | None:
    """Other tokens in the middle one of three responses: all other outputs keep their bits."""
    given = _made(device, sum(row.lengths), shape, dtype)[:3]
    start = sum(row.lengths[:7])
    own = slice(start, start + row.lengths[7])
    changed = [x.clone() for x in given]
    for x in changed:
        x[own] = 3.0 * x[own].flip(0) + 1.0
    packed = packed_row(row.lengths, device, parents=row.parents)
    attend: Callable[..., Tensor] = partial(packed_attention, row=packed, scale=None, window=None)
    before, after = (attend(*x) for x in (given, changed))
    same_T = (before == after).flatten(1).all(1)
    if bool(same_T[own].any()):
        return "the response that is other has the same output"
    same_T[own] = True
    return None if bool(same_T.all()) else f"{int((~same_T).sum())} tokens of other sequences have changed"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.prompts", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds; what is left then is skipped")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU")
    arguments = parser.parse_args(argv)
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    found = results_of(checks(device), Deadline(arguments.limit))
    result: dict[str, Any] = {"torch": torch.__version__, "device": device.type, "checks": found}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(check["passed"] is False for check in found) else 0


if __name__ == "__main__":
    sys.exit(main())
