"""From the table of experience to a role's micro-batches and back.

Per-token columns stand at the token: what comes out at the token before it, such as its log-prob and value, is brought
there (`MicroBatch.before`). A prompt's last token may have several behind it.

Legend: B rows and S columns of a micro-batch, N samples of the step, K of the micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarlhf.algo.averaging import Aggregation, response_weights
from megarlhf.config import MicroBatchConfig, Shuffle
from megarlhf.experience import ColumnSharding, Experience, Ragged, redistribute
from megarlhf.models.role import Role
from megarlhf.parallel.batching import Batching, owners_of_outputs
from megarlhf.parallel.micro_batch import (
    MicroBatch,
    MicroBatchLayout,
    TokenSpans,
    gather_from_micro_batch,
    micro_batch_mask,
    prompts_computed,
    repeat_on_micro_batch,
    scatter_to_micro_batch,
)


def split_into_mini_batches(groups: Sequence[int], size: int, *, shuffle: Shuffle, seed: int) -> list[list[int]]:
    """The samples of a step split into mini-batches of global sample indices, the same on every rank.

    groups: by sample; samples of one prompt share a number. With `groups` these come in random order, each with its
    samples in their own; one that lies across the border of two mini-batches is divided between them.
    """
    by_group: dict[int, list[int]] = {}
    for sample, group in enumerate(groups):
        by_group.setdefault(group if shuffle == "groups" else sample, []).append(sample)
    units = list(by_group.values())
    if shuffle != "none":
        order = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed)).tolist()
        units = [units[n] for n in order]
    samples = list(itertools.chain.from_iterable(units))
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def prompts_of(mini_batches: Sequence[Sequence[int]], groups: Sequence[int]) -> list[int]:
    """How many prompts each mini-batch has to compute, where each is computed once in it."""
    return [len({groups[sample] for sample in samples}) for samples in mini_batches]


def micro_batches(
    role: Role,
    experience: Experience,
    samples: Sequence[int],
    micro: MicroBatchConfig,
    columns: Sequence[str] = (),
    weights_N: Tensor | None = None,
) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of `samples`, with the named per-token columns.

    `weights_N`: of each token of each sample of the step, in the loss; on the CPU.
    """
    layouts = role.mesh.own(_layouts_by_rank(role, experience, [samples], micro))
    return [micro_batch(role, experience, layout, columns, weights_N) for layout in layouts]


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
    """What `role` reads of the samples on `layout`; the columns on its last stage alone, where losses are made."""
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
    return TokenSpans.responses(experience.prompt_lengths_N, experience.response_lengths_N)


def forward_per_token(
    role: Role,
    experience: Experience,
    mini_batches: Sequence[Sequence[int]],
    micro: MicroBatchConfig,
    score: Callable[[Tensor, MicroBatch], Tensor],
) -> Ragged:
    """Run a role over every sample and bring `score`'s [B, S] grid back as a per-token column.

    Its micro-batches are those that training on `mini_batches` will have. The column's rows are with the ranks that
    `experience.holding` says.
    """
    layouts = role.mesh.own(_layouts_by_rank(role, experience, mini_batches, micro))
    grids = role.forward([micro_batch(role, experience, layout) for layout in layouts], score)
    return per_token_of(role, experience, mini_batches, micro, grids)


def per_token_of(
    role: Role,
    experience: Experience,
    mini_batches: Sequence[Sequence[int]],
    micro: MicroBatchConfig,
    grids: Sequence[Tensor],
) -> Ragged:
    """[B, S] grids of the role's micro-batches in order, which ranks of the last stage have, as a per-token column.

    There may be more grids than these micro-batches, of others behind them.
    """
    by_rank = _layouts_by_rank(role, experience, mini_batches, micro, planned=True)
    mine: dict[int, Tensor] = {}
    if role.mesh.owns_outputs:
        layouts, responses = role.mesh.own(by_rank), response_spans(experience)
        for layout, grid_BS in zip(layouts, grids[: len(layouts)], strict=True):
            mine |= gather_from_micro_batch(layout, grid_BS, responses)
    owners = owners_of_outputs(role.mesh, by_rank)
    return redistribute(mine, experience.response_lengths_N, _like(role), owners, experience.holding)


def holding_of(
    trained: Sequence[Role],
    experience: Experience,
    passes: Sequence[Sequence[Sequence[int]]],
    micro: MicroBatchConfig,
) -> ColumnSharding | None:
    """Who reads the token columns of which samples: the last pipeline stages that compute a loss of them, in any of the
    mini-batches of any pass, for any of the roles. None where that is every rank."""
    world_size = trained[0].mesh.runtime.world_size
    if world_size == 1:
        return None
    resident_WN = torch.zeros(world_size, experience.num_samples, dtype=torch.bool)
    lengths_N = experience.sequences.lengths_N
    for role, mini_batches in itertools.product(trained, passes):
        for samples in mini_batches:
            batching = role.batching(micro)
            groups, shared = _groups(batching, experience, samples)
            by_rank = batching.planned_by_rank(groups, lengths_N, shared=shared, divisible=True)
            for dp, layouts in enumerate(by_rank):
                read = [n for layout in layouts for n in layout.sequences]
                for rank in role.mesh.last_stage(dp):
                    resident_WN[rank, read] = True
    return None if bool(resident_WN.all()) else ColumnSharding(resident_WN)


def forward_per_sample(
    role: Role, experience: Experience, micro: MicroBatchConfig, score: Callable[[Tensor, MicroBatch], Tensor]
) -> Tensor:
    """Run a role over every sample and bring `score`'s [K], one for each sample of a layout, back as an [N] column."""
    by_rank = _layouts_by_rank(role, experience, [range(experience.num_samples)], micro)
    layouts = role.mesh.own(by_rank)
    scores = role.forward([micro_batch(role, experience, layout) for layout in layouts], score)
    mine: dict[int, Tensor] = {}
    if role.mesh.owns_outputs:
        for layout, scores_K in zip(layouts, scores, strict=True):
            # Sizes, since what is empty splits into one part.
            mine |= dict(zip(layout.sequences, scores_K.split([1] * len(layout.sequences)), strict=True))
    ones_N = torch.ones(experience.num_samples, dtype=torch.int64)
    return redistribute(mine, ones_N, _like(role), owners_of_outputs(role.mesh, by_rank)).values_T


def shared_prompts(
    role: Role, experience: Experience, samples: Sequence[int], micro: MicroBatchConfig
) -> dict[str, float]:
    """How many prompts a pass of the role over the mini-batch `samples` computes and spares."""
    batching = role.batching(micro)
    groups, shared = _groups(batching, experience, samples)
    by_rank = batching.planned_by_rank(groups, experience.sequences.lengths_N, shared=shared, divisible=True)
    computed, saved = prompts_computed(by_rank)
    return {"prompts_computed": float(computed), "prompts_saved": float(saved)}


def _layouts_by_rank(
    role: Role,
    experience: Experience,
    mini_batches: Sequence[Sequence[int]],
    micro: MicroBatchConfig,
    *,
    planned: bool = False,
) -> list[list[MicroBatchLayout]]:
    """The micro-batches of all mini-batches, by data-parallel rank. `planned`: nothing is about to be computed on
    them, see `Batching.planned_by_rank`."""
    batching, lengths_N = role.batching(micro), experience.sequences.lengths_N
    by_rank = batching.planned_by_rank if planned else batching.layouts_by_rank
    each = []
    for samples in mini_batches:
        groups, shared = _groups(batching, experience, samples)
        each.append(by_rank(groups, lengths_N, shared=shared, divisible=True))
    return [[layout for layouts in of_rank for layout in layouts] for of_rank in zip(*each, strict=True)]


def _groups(
    batching: Batching, experience: Experience, samples: Sequence[int]
) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """The samples of each prompt, and how many tokens it has. Equal prompts that were drawn from apart stay apart.
    Where nothing is shared: each sample alone."""
    if not batching.shares:
        return [(n,) for n in samples], ()
    groups: dict[int, list[int]] = {}
    for n in samples:
        first = groups.setdefault(int(experience.prompt_numbers_N[n]), [n])[0]
        assert torch.equal(experience.prompts[first], experience.prompts[n]), f"samples {first} and {n}: two prompts"
        if first != n:
            groups[int(experience.prompt_numbers_N[n])].append(n)
    return list(groups.values()), [len(experience.prompts[group[0]]) for group in groups.values()]


def _like(role: Role) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=role.mesh.runtime.device)
