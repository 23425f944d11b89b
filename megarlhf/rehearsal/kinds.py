"""Choice of the ranks to rehearse: one of each kind.

Ranks are of one kind when they hold the same stages of every role and make equal collectives. Tensor-parallel
neighbours are of one kind. So are context-parallel ones, but for the partial outputs of TransformerEngine's ring: the
last rank holds the most and is taken. Data-parallel ranks differ in the lengths of their sequences: the ranks with the
most and the least work are taken, and the rank that trains the largest micro-batch. Which of its positions predict
responses is not considered: where logits are large, another rank may need more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megarlhf.layout import MeshLayout
from megarlhf.rehearsal.fakes.batches import Loads, RankLoad

LARGER = 1.01
"""Least ratio by which a micro-batch must be larger to be rehearsed for its memory."""

Stages = tuple[tuple[str, int | None], ...]
"""(role, pipeline stage) of a rank; the stage is None where the rank holds nothing of the role."""


@dataclass(frozen=True)
class Kind:
    """A rank that represents others like it."""

    rank: int
    stages: Stages
    stands_for: int
    """Number of ranks with the same stages, this one included."""
    why: str
    """Reason for the choice, as a sentence."""


def stages_of(rank: int, layouts: Mapping[str, MeshLayout]) -> Stages:
    return tuple(
        (role, layout.coordinates(rank).pp if rank in layout.ranks else None) for role, layout in layouts.items()
    )


def first_rank(layouts: Mapping[str, MeshLayout], main: str) -> int:
    """The rank that is rehearsed first. Its record tells the work of every rank."""
    return layouts[main].rank_at(cp=layouts[main].cp - 1)


def choose_ranks(
    layouts: Mapping[str, MeshLayout], main: str, loads: Loads, *, busy_expert: bool = False
) -> list[Kind]:
    """One rank of each kind.

    main: the role whose pipelines are rehearsed whole, so that messages between stages meet.
    busy_expert: whether one expert of each layer, the first, gets more tokens than the others. Not all ranks have it.
    """
    mesh, by_stages = layouts[main], _ranks_by_stages(layouts)
    kinds: dict[int, Kind] = {}

    def add(rank: int, why: str) -> None:
        stages = stages_of(rank, layouts)
        kinds.setdefault(rank, Kind(rank, stages, len(by_stages[stages]), why))

    for dp, why in _pipelines(layouts, main, loads).items():
        for pp in range(mesh.pp):
            add(mesh.rank_at(dp=dp, pp=pp, cp=mesh.cp - 1), why)
    if busy_expert and mesh.ep > 1:
        for pp in range(mesh.pp):
            add(mesh.rank_at(pp=pp), "the rank with the busiest expert")
    covered = {kind.stages for kind in kinds.values()}
    for stages, ranks in by_stages.items():
        if stages not in covered:
            add(ranks[0], "another combination of stages")
    return [kinds[rank] for rank in sorted(kinds)]


def named_ranks(ranks: Iterable[int], layouts: Mapping[str, MeshLayout]) -> list[Kind]:
    """The ranks that the user named."""
    by_stages = _ranks_by_stages(layouts)
    return [
        Kind(rank, (stages := stages_of(rank, layouts)), len(by_stages[stages]), "asked for")
        for rank in sorted(set(ranks))
    ]


def _ranks_by_stages(layouts: Mapping[str, MeshLayout]) -> dict[Stages, list[int]]:
    by_stages: dict[Stages, list[int]] = {}
    for rank in range(next(iter(layouts.values())).world_size):
        by_stages.setdefault(stages_of(rank, layouts), []).append(rank)
    return by_stages


def _pipelines(layouts: Mapping[str, MeshLayout], main: str, loads: Loads) -> dict[int, str]:
    """Data-parallel ranks of the main role, each with the reason for its choice."""
    mesh = layouts[main]
    work = [_load_of(mesh.rank_at(dp=dp), layouts, loads) for dp in range(mesh.dp)]
    if mesh.dp == 1 or not loads:
        return {0: "the only data-parallel rank" if mesh.dp == 1 else "the first data-parallel rank"}
    by_cost = sorted(range(mesh.dp), key=lambda dp: work[dp].cost)
    reasons = {by_cost[-1]: "the data-parallel rank with the most work"}
    if work[by_cost[0]].cost < work[by_cost[-1]].cost:
        reasons[by_cost[0]] = "the data-parallel rank with the least work"
    # Only what is trained leaves activations.
    trained = {phase: by_dp for phase, by_dp in loads.items() if phase.startswith("train/")}
    longest = [_load_of(mesh.rank_at(dp=dp), layouts, trained).longest for dp in range(mesh.dp)]
    largest = max(range(mesh.dp), key=lambda dp: longest[dp])
    if longest[largest] > LARGER * max(longest[dp] for dp in reasons):
        reasons[largest] = "the data-parallel rank with the largest micro-batch"
    return reasons


def _load_of(rank: int, layouts: Mapping[str, MeshLayout], loads: Loads) -> RankLoad:
    total = RankLoad(0.0, 0, 0, 0)
    for phase, by_dp in loads.items():
        role = "reward_model" if phase == "reward" else phase.partition("/")[2]
        layout = layouts.get(role)
        if layout is not None and layout.dp == len(by_dp) and rank in layout.ranks:
            total += by_dp[layout.coordinates(rank).dp]
    return total


def complete_pipelines(ranks: Iterable[int], mesh: MeshLayout) -> list[int]:
    """The ranks whose pipelines of a role are complete, so that their traces can be replayed together.

    A rank without the role is among them: no pipeline of its own can be cut.
    """
    rehearsed, complete = set(ranks), []
    for rank in sorted(rehearsed):
        if rank not in mesh.ranks:
            complete.append(rank)
            continue
        own = mesh.coordinates(rank)
        if all(mesh.rank_at(tp=own.tp, cp=own.cp, dp=own.dp, pp=pp) in rehearsed for pp in range(mesh.pp)):
            complete.append(rank)
    return complete
