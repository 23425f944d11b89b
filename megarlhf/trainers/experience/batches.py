"""From the table of experience to a role's micro-batches and back.

Per-token columns stand at the token: what comes out at the token before it, such as its log-prob and value, is brought
there (`MicroBatch.before`). A prompt's last token may have several behind it.

Legend: B rows and S columns of a micro-batch, N samples of the step, K of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarlhf.algo.averaging import Aggregation, response_weights
from megarlhf.experience import Experience, Ragged, redistribute
from megarlhf.models.role import Role
from megarlhf.parallel.batching import owners_of_outputs
from megarlhf.parallel.micro_batch import (
    MicroBatch,
    MicroBatchLayout,
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
    """[N] fp64 on the CPU: the weight of each token of the mini-batch `samples` in a loss, see `response_weights`; 0
    for the other samples of the step."""
    lengths_N = experience.trained_lengths_N[list(samples)]
    weights_N = torch.zeros(experience.num_samples, dtype=torch.float64)
    weights_N[list(samples)] = response_weights(
        lengths_N, average, constant=constant, block=block, count_left_out=count_left_out
    )
    return weights_N


def micro_batch(
    role: Role,
    experience: Experience,
    layout: MicroBatchLayout,
    columns: Sequence[str] = (),
    weights_N: Tensor | None = None,
) -> MicroBatch:
    """Tokens and columns of the samples on `layout`; the columns on the role's last stage alone, where losses are
    made."""
    device = role.mesh.runtime.device
    responses = response_spans(experience)
    grids = {
        "response_mask": micro_batch_mask(layout, responses, device),
        "sample_numbers": repeat_on_micro_batch(layout, torch.arange(experience.num_samples), responses, device),
    }
    if weights_N is not None:
        grids["loss_weights"] = repeat_on_micro_batch(layout, weights_N, responses, device)
    for name in columns if role.mesh.is_last_stage else ():
        grids[name] = scatter_to_micro_batch(layout, experience.columns[name], responses)
    tokens_BS = scatter_to_micro_batch(layout, experience.sequences, TokenSpans.whole(experience.sequences.lengths_N))
    return MicroBatch(tokens_BS.to(device), {name: grid.to(device) for name, grid in grids.items()}, layout)


def response_spans(experience: Experience) -> TokenSpans:
    """Where the sampled tokens stand in the sequences: the rows of the columns."""
    return TokenSpans(*experience.sampled_stretches).require_predicted()


def micro_batches(
    role: Role,
    experience: Experience,
    plan: StepPlan,
    samples: Sequence[int],
    columns: Sequence[str] = (),
    weights_N: Tensor | None = None,
) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of the mini-batch `samples`, with the named per-token columns.

    `weights_N`: of each token of each sample of the step, in the loss; on the CPU.
    """
    layouts = plan.own_layouts(role, [samples])
    return [micro_batch(role, experience, layout, columns, weights_N) for layout in layouts]


def forward_per_token(
    role: Role,
    experience: Experience,
    plan: StepPlan,
    mini_batches: Sequence[Sequence[int]],
    score: Callable[[Tensor, MicroBatch], Tensor],
) -> Ragged:
    """Run a role over the samples of `mini_batches`, on the micro-batches in which it trains on them, and bring
    `score`'s [B, S] grid back as a per-token column. Its rows are with the ranks that `experience.holding` says."""
    layouts = plan.own_layouts(role, mini_batches)
    grids = role.forward([micro_batch(role, experience, layout) for layout in layouts], score)
    return per_token_of(role, experience, plan, mini_batches, grids)


def per_token_of(
    role: Role,
    experience: Experience,
    plan: StepPlan,
    mini_batches: Sequence[Sequence[int]],
    grids: Sequence[Tensor],
) -> Ragged:
    """[B, S] grids of the role's micro-batches in order, which ranks of the last stage have, as a per-token column.

    There may be more grids than these micro-batches, of others behind them.
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
    """Run a role over every sample and bring `score`'s [K], one for each sample of a layout, back as an [N] column."""
    layouts = plan.own_layouts(role, plan.mini_batches)
    scores = role.forward([micro_batch(role, experience, layout) for layout in layouts], score)
    mine: dict[int, Tensor] = {}
    if role.mesh.owns_outputs:
        for layout, scores_K in zip(layouts, scores, strict=True):
            # Sizes, since what is empty splits into one part.
            mine |= dict(zip(layout.sequences, scores_K.split([1] * len(layout.sequences)), strict=True))
    ones_N = torch.ones(experience.num_samples, dtype=torch.int64)
    owners = owners_of_outputs(role.mesh, plan.layouts_by_rank(role, plan.mini_batches))
    return redistribute(mine, ones_N, _like(role), owners).values_T


def _like(role: Role) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=role.mesh.runtime.device)
