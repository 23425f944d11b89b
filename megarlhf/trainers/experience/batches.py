"""Conversion of the table of experience to a role's micro-batches, and of their outputs to columns.

Per-token values are stored at the token that they describe, although the model computes them at the token before it:
`MicroBatch.before` moves them. With a shared prompt several tokens may follow one.

Legend: B rows and S columns of a micro-batch, N samples of the step, K of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarlhf.algo.averaging import Aggregation, response_weights
from megarlhf.columns import Ragged, redistribute
from megarlhf.experience import Experience
from megarlhf.models.role import Role
from megarlhf.parallel.batching import owners_of_outputs
from megarlhf.parallel.micro_batch import (
    MicroBatch,
    TokenSpans,
    gather_from_micro_batch,
    micro_batch_mask,
    repeat_on_micro_batch,
    scatter_to_micro_batch,
)
from megarlhf.trainers.experience.plan import StepPlan


def loss_weights(
    experience: Experience,
    samples: Sequence[int],
    average: Aggregation,
    constant: int | None = None,
    block: int | None = None,
    *,
    count_left_out: bool = False,
) -> Tensor:
    """[N] fp64 on the CPU: weight of each token of the mini-batch `samples` in a loss, from `response_weights`. The
    other samples of the step have 0."""
    lengths_N = experience.trained_lengths_N[list(samples)]
    weights_N = torch.zeros(experience.num_samples, dtype=torch.float64)
    weights_N[list(samples)] = response_weights(
        lengths_N, average, constant=constant, block=block, count_left_out=count_left_out
    )
    return weights_N


def micro_batches(
    role: Role,
    experience: Experience,
    plan: StepPlan,
    mini_batches: Sequence[Sequence[int]],
    columns: Sequence[str] = (),
    weights_N: Tensor | None = None,
) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of the mini-batches. Only the role's last stage, which computes the loss,
    has the named per-token `columns`.

    `weights_N`: weight of each sample's tokens in the loss, for all samples of the step; on the CPU.
    """
    device = role.mesh.runtime.device
    responses, whole = response_spans(experience), TokenSpans.whole(experience.sequences.lengths_N)
    batches = []
    for layout in plan.own_layouts(role, mini_batches):
        grids = {
            "response_mask": micro_batch_mask(layout, responses, device),
            "sample_numbers": repeat_on_micro_batch(layout, torch.arange(experience.num_samples), responses, device),
        }
        if weights_N is not None:
            grids["loss_weights"] = repeat_on_micro_batch(layout, weights_N, responses, device)
        for name in columns if role.mesh.is_last_stage else ():
            grids[name] = scatter_to_micro_batch(layout, experience.columns[name], responses)
        tokens_BS = scatter_to_micro_batch(layout, experience.sequences, whole)
        on_device = {name: grid.to(device) for name, grid in grids.items()}
        batches.append(MicroBatch(tokens_BS.to(device), on_device, layout))
    return batches


def response_spans(experience: Experience) -> TokenSpans:
    """Positions of the sampled tokens in the sequences. They are the rows of the columns."""
    return TokenSpans(*experience.sampled_stretches).require_predicted()


def forward_per_token(
    role: Role,
    experience: Experience,
    plan: StepPlan,
    mini_batches: Sequence[Sequence[int]],
    score: Callable[[Tensor, MicroBatch], Tensor],
) -> Ragged:
    """Run a role over the samples of `mini_batches` in the micro-batches of its training, and return `score`'s [B, S]
    grids as a per-token column. Its rows are on the ranks that `experience.holding` names."""
    grids = role.forward(micro_batches(role, experience, plan, mini_batches), score)
    return per_token_of(role, experience, plan, mini_batches, grids)


def per_token_of(
    role: Role,
    experience: Experience,
    plan: StepPlan,
    mini_batches: Sequence[Sequence[int]],
    grids: Sequence[Tensor],
) -> Ragged:
    """Per-token column from the [B, S] grids of the role's micro-batches in order, which only the last stage has.

    Grids of further micro-batches may follow; they are ignored.
    """
    by_rank = plan.layouts_by_rank(role, mini_batches)
    mine: dict[int, Tensor] = {}
    if role.mesh.owns_outputs:
        layouts, responses = role.mesh.own(by_rank), response_spans(experience)
        for layout, grid_BS in zip(layouts, grids[: len(layouts)], strict=True):
            mine |= gather_from_micro_batch(layout, grid_BS, responses)
    owners = owners_of_outputs(role.mesh, by_rank)
    return redistribute(mine, experience.response_lengths_N, _like(role), owners, experience.holding)


def forward_per_sample(
    role: Role, experience: Experience, plan: StepPlan, score: Callable[[Tensor, MicroBatch], Tensor]
) -> Tensor:
    """Run a role over every sample, and return `score`'s [K], one value per sequence of a micro-batch, as an [N]
    column."""
    batches = micro_batches(role, experience, plan, plan.mini_batches)
    scores = role.forward(batches, score)
    mine: dict[int, Tensor] = {}
    if role.mesh.owns_outputs:
        for batch, scores_K in zip(batches, scores, strict=True):
            assert batch.layout is not None
            # With sizes given, an empty tensor is split into no parts instead of one.
            mine |= dict(zip(batch.layout.sequences, scores_K.split([1] * len(batch.layout.sequences)), strict=True))
    ones_N = torch.ones(experience.num_samples, dtype=torch.int64)
    owners = owners_of_outputs(role.mesh, plan.layouts_by_rank(role, plan.mini_batches))
    return redistribute(mine, ones_N, _like(role), owners).values_T


def _like(role: Role) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=role.mesh.runtime.device)
