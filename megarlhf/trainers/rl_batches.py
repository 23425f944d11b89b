"""From the table of experience to a role's micro-batches and back.

Per-token columns stand at the position that *predicts* the token: response token j of a prompt of p tokens stands at
position p - 1 + j of its sequence, where its log-prob and value come out.

Legend: B rows and S columns of a micro-batch, N samples of the step, K of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarlhf.config import MicroBatchConfig
from megarlhf.experience import Experience, Ragged, redistribute
from megarlhf.models.role import Role
from megarlhf.parallel.batching import Sheet, Spans, lay_out, mask_of, pick_up, spread
from megarlhf.parallel.step import MicroBatch


def mini_batches(num_samples: int, size: int, *, shuffle: bool, seed: int) -> list[list[int]]:
    """The samples of a step dealt into mini-batches of global sample indices, the same on every rank."""
    order = list(range(num_samples))
    if shuffle:
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[start : start + size] for start in range(0, num_samples, size)]


def micro_batches(
    role: Role, experience: Experience, samples: Sequence[int], micro: MicroBatchConfig, columns: Sequence[str] = ()
) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of `samples`, with the named per-token columns."""
    return [micro_batch(role, experience, sheet, columns) for sheet in _sheets(role, experience, [samples], micro)]


def micro_batch(role: Role, experience: Experience, sheet: Sheet, columns: Sequence[str] = ()) -> MicroBatch:
    """What `role` reads of the samples on `sheet`."""
    device = role.mesh.runtime.device
    responses = response_spans(experience)
    found = {
        "response_mask": mask_of(sheet, responses, device),
        "response_lengths": spread(sheet, experience.response_lengths_N, responses, device),
    }
    for name in columns:
        found[name] = lay_out(sheet, experience.columns[name], responses)
    tokens_BS = lay_out(sheet, experience.sequences, Spans.whole(experience.sequences.lengths_N))
    return MicroBatch(tokens_BS.to(device), {name: grid.to(device) for name, grid in found.items()}, sheet)


def response_spans(experience: Experience) -> Spans:
    """The positions that predict response tokens."""
    return Spans.predicting(experience.prompt_lengths_N, experience.response_lengths_N)


def per_token(
    role: Role,
    experience: Experience,
    dealt: Sequence[Sequence[int]],
    micro: MicroBatchConfig,
    score: Callable[[Tensor, MicroBatch], Tensor],
) -> Ragged:
    """Run a role over every sample and bring `score`'s [B, S] grid back as a per-token column.

    `dealt` are mini-batches: the micro-batches of the forward are those that training on them will have.
    """
    sheets = _sheets(role, experience, dealt, micro)
    grids = role.forward([micro_batch(role, experience, sheet) for sheet in sheets], score)
    mine: dict[int, Tensor] = {}
    if role.mesh.owns_outputs:
        responses = response_spans(experience)
        for sheet, grid_BS in zip(sheets, grids, strict=True):
            mine |= pick_up(sheet, grid_BS, responses)
    return redistribute(mine, experience.response_lengths_N, _like(role))


def per_sample(
    role: Role, experience: Experience, micro: MicroBatchConfig, score: Callable[[Tensor, MicroBatch], Tensor]
) -> Tensor:
    """Run a role over every sample and bring `score`'s [K], one for each sample of a sheet, back as an [N] column."""
    sheets = _sheets(role, experience, [range(experience.num_samples)], micro)
    found = role.forward([micro_batch(role, experience, sheet) for sheet in sheets], score)
    mine: dict[int, Tensor] = {}
    if role.mesh.owns_outputs:
        for sheet, scores_K in zip(sheets, found, strict=True):
            # Sizes, since what is empty splits into one part.
            mine |= dict(zip(sheet.sequences, scores_K.split([1] * len(sheet.sequences)), strict=True))
    return redistribute(mine, torch.ones(experience.num_samples, dtype=torch.int64), _like(role)).values_T


def _sheets(role: Role, experience: Experience, dealt: Sequence[Sequence[int]], micro: MicroBatchConfig) -> list[Sheet]:
    batching, lengths_N = role.batching(micro), experience.sequences.lengths_N
    return [sheet for samples in dealt for sheet in batching.sheets([(n,) for n in samples], lengths_N)]


def _like(role: Role) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=role.mesh.runtime.device)
