"""Rows of trees, and each of their sequences attended to alone, as the reference in fp64."""

import math
import random

import torch
from torch import Tensor

from megarlhf.parallel.packing.rows import ROOT

CPU = torch.device("cpu")
Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Lengths and parents."""


def random_row(depth: int, seed: int) -> Row:
    """Roots of which some are continued, levels in which some are, fillers behind."""
    draw = random.Random(seed)
    parents, level = [ROOT] * 5, range(5)
    for _ in range(depth - 1):
        children = [n for n in level for _ in range(draw.choice((0, 1, 2, 4)))] or [level[-1]]
        parents += children
        level = range(len(parents) - len(children), len(parents))
    parents += [ROOT] * draw.randrange(3)
    return tuple(draw.choice((1, 2, 5, 9, 17, 30)) for _ in parents), tuple(parents)


ROWS: dict[str, Row] = {
    "a pair": ((7, 4, 9), (-1, 0, 0)),
    "one token each": ((1, 1, 1), (-1, 0, 0)),
    "equal groups": ((8, 8, 8, *[6] * 9), (-1, -1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 2)),
    "plain sequences around": ((6, 9, 5, 4, 3, 8, 11, 6), (-1, -1, -1, -1, 1, 1, 2, -1)),
    "long": ((200, 70, 130, 90, 150, 64), (-1, -1, 0, 0, 1, -1)),
    "a chain": ((5, 4, 7, 1, 9), (-1, 0, 1, 2, 3)),
    **{f"depth 2, {seed}": random_row(2, seed) for seed in range(3)},
    **{f"depth 4, {seed}": random_row(4, seed) for seed in range(3)},
}


def inputs(row: Row, groups: int, head_dim: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Query, key, value and the output's gradient; four heads."""
    generator = torch.Generator().manual_seed(sum(row[0]) + groups)
    shapes = [(sum(row[0]), n, head_dim) for n in (4, groups, groups, 4)]
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)


def attention(query, key, value, scale, seen) -> tuple[Tensor, Tensor]:
    """Softmax of scores, and their log-sum-exp [N, L], of the pairs [L, K] that are seen."""
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = torch.einsum("ind,jnd->nij", query, key) * (1 / math.sqrt(query.size(2)) if scale is None else scale)
    scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("nij,jnd->ind", scores.softmax(-1), value), scores.logsumexp(-1)


def way_to(n: int, parents) -> list[int]:
    return [*(way_to(parents[n], parents) if parents[n] != ROOT else []), n]


def alone(query, key, value, row: Row, scale, window) -> Tensor:
    """Each segment as the end of its sequence from the root, which is computed without any other."""
    lengths, parents = row
    segments = [x.split(lengths) for x in (query, key, value)]
    ends = []
    for n, length in enumerate(lengths):
        q, k, v = (torch.cat([parts[i] for i in way_to(n, parents)]) for parts in segments)
        seen = torch.ones(len(q), len(q), dtype=torch.bool).tril().triu(1 - (window or len(q)))
        ends.append(attention(q, k, v, scale, seen)[0][-length:])
    return torch.cat(ends)


def close(actual, expected, **band) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **(band or {"rtol": 1e-10, "atol": 1e-11}))
