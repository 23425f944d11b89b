"""Dealing samples to data-parallel ranks and micro-batches, and laying rows out on a padded grid.

Every rank knows every sample's length, so all agree on shapes without a message.

Legend: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarlhf.layout import split_evenly
from megarlhf.parallel.mesh import Mesh

FILLER = -1
"""Stands for a sample where a rank has a row too many; nothing is computed from it."""


def deal(samples: Sequence[int], mesh: Mesh, micro_batch_samples: int) -> list[list[int]]:
    """This data-parallel rank's micro-batches of `samples`: a contiguous share, in order.

    All ranks get the same number of full micro-batches; a share that falls short is filled with `FILLER`.
    """
    dp = mesh.layout.dp
    shares = [[samples[n] for n in share] for share in split_evenly(len(samples), dp)]
    count = -(-max(map(len, shares)) // micro_batch_samples)
    mine = shares[mesh.at.dp]
    mine = mine + [FILLER] * (count * micro_batch_samples - len(mine))
    return [mine[start : start + micro_batch_samples] for start in range(0, len(mine), micro_batch_samples)]


def grid_length(longest: int, mesh: Mesh) -> int:
    """Columns of the grid for sequences of up to `longest` tokens; sequence parallelism needs a multiple of tp."""
    tp = mesh.layout.tp
    return -(-longest // tp) * tp


def lay_out(
    rows: Sequence[tuple[int, Tensor] | None],
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    fill: float = 0,
) -> Tensor:
    """[B, S]: each row's values from its start column on, `fill` elsewhere; None is an empty row."""
    grid_BS = torch.full((len(rows), length), fill, dtype=dtype)
    for row, placed in enumerate(rows):
        if placed is not None:
            start, values = placed
            grid_BS[row, start : start + len(values)] = values.to("cpu", dtype)
    return grid_BS.to(device)


def response_mask(spans: Sequence[tuple[int, int] | None], length: int, device: torch.device) -> Tensor:
    """[B, S] bool: True where the *next* token is a response token.

    `spans` are (prompt tokens, response tokens) of each row, None for an empty row. A prompt has at least one
    token, or nothing would predict the response's first.
    """
    mask_BS = torch.zeros(len(spans), length, dtype=torch.bool)
    for row, span in enumerate(spans):
        if span is not None:
            prompt, response = span
            assert prompt >= 1, f"row {row} has an empty prompt: nothing predicts its first response token"
            assert prompt + response <= length, f"row {row}: {prompt} + {response} tokens on a grid of {length}"
            mask_BS[row, prompt - 1 : prompt - 1 + response] = True
    return mask_BS.to(device)
