"""From the table of experience to a role's micro-batches and back.

Per-token columns stand on the grid at the position that *predicts* the token: response token j of a prompt of p
tokens stands at column p - 1 + j, where its log-prob and value come out.

Legend: B rows, S positions, N samples of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarlhf.experience import Experience, Ragged, redistribute
from megarlhf.models.role import Role
from megarlhf.parallel.batching import FILLER, deal, grid_length, lay_out, response_mask
from megarlhf.parallel.mesh import Mesh
from megarlhf.parallel.step import MicroBatch


def mini_batches(num_samples: int, size: int, *, shuffle: bool, seed: int) -> list[list[int]]:
    """The samples of a step dealt into mini-batches of global sample indices, the same on every rank."""
    order = list(range(num_samples))
    if shuffle:
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[start : start + size] for start in range(0, num_samples, size)]


def micro_batches(
    experience: Experience,
    samples: Sequence[int],
    mesh: Mesh,
    micro_batch_samples: int,
    columns: Sequence[str] = (),
) -> list[MicroBatch]:
    """This data-parallel rank's share of `samples` on the step's grid, with the named per-token columns."""
    device = mesh.runtime.device
    length = grid_length(experience.longest, mesh)
    responses = experience.rollouts.responses.rows()
    values = {name: experience.columns[name].rows() for name in columns}
    batches = []
    for rows in deal(samples, mesh, micro_batch_samples):
        tokens = [None if n == FILLER else (0, torch.cat([experience.prompts[n], responses[n].cpu()])) for n in rows]
        spans = [None if n == FILLER else (len(experience.prompts[n]), len(responses[n])) for n in rows]
        found: dict[str, Tensor] = {"response_mask": response_mask(spans, length, device)}
        found["last_token"] = torch.tensor([0 if span is None else sum(span) - 1 for span in spans], device=device)
        for name, per_sample in values.items():
            placed = [None if n == FILLER else (len(experience.prompts[n]) - 1, per_sample[n]) for n in rows]
            found[name] = lay_out(placed, length, torch.float32, device)
        batches.append(MicroBatch(tokens_BS=lay_out(tokens, length, torch.int64, device), columns=found))
    return batches


def per_token(
    role: Role,
    experience: Experience,
    dealt: Sequence[Sequence[int]],
    micro_batch_samples: int,
    score: Callable[[Tensor, MicroBatch], Tensor],
) -> Ragged:
    """Run a role over every sample and bring `score`'s [B, S] grid back as a per-token column.

    `dealt` are mini-batches: the micro-batches of the forward are those that training on them will have.
    """
    mesh = role.mesh
    rows = [row for samples in dealt for batch in deal(samples, mesh, micro_batch_samples) for row in batch]
    grids = role.forward(_all(experience, dealt, mesh, micro_batch_samples), score)
    mine: dict[int, Tensor] = {}
    if mesh.owns_outputs:
        for sample, line_S in zip(rows, torch.cat(grids), strict=True):
            if sample != FILLER:
                start = len(experience.prompts[sample]) - 1
                mine[sample] = line_S[start : start + int(experience.response_lengths_N[sample])]
    like = torch.empty(0, dtype=torch.float32, device=mesh.runtime.device)
    return redistribute(mine, experience.response_lengths_N, like)


def per_sample(
    role: Role,
    experience: Experience,
    micro_batch_samples: int,
    score: Callable[[Tensor, MicroBatch], Tensor],
) -> Tensor:
    """Run a role over every sample and bring `score`'s [B] back as an [N] column."""
    mesh = role.mesh
    everything = [list(range(experience.num_samples))]
    rows = [row for batch in deal(everything[0], mesh, micro_batch_samples) for row in batch]
    scores = role.forward(_all(experience, everything, mesh, micro_batch_samples), score)
    mine: dict[int, Tensor] = {}
    if mesh.owns_outputs:
        mine = {n: value[None] for n, value in zip(rows, torch.cat(scores), strict=True) if n != FILLER}
    like = torch.empty(0, dtype=torch.float32, device=mesh.runtime.device)
    return redistribute(mine, torch.ones(experience.num_samples, dtype=torch.int64), like).values_T


def _all(
    experience: Experience, dealt: Sequence[Sequence[int]], mesh: Mesh, micro_batch_samples: int
) -> list[MicroBatch]:
    return [batch for samples in dealt for batch in micro_batches(experience, samples, mesh, micro_batch_samples)]
