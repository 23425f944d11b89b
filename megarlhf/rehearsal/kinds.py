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
from megarlhf.rehearsal.fakes.batches import RankLoad, Shares

LARGER = 1.01
"""Least ratio by which a micro-batch must be larger to be rehearsed for its memory."""

Stages = tuple[tuple[str, int | None], ...]
"""(role, pipeline stage) of a rank; the stage is None where the rank holds nothing of the role."""


@dataclass(frozen=True)
class Kind:
    """A rank that stands for others like it."""

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


def chosen(layouts: Mapping[str, MeshLayout], main: str, shares: Shares, *, busy_expert: bool = False) -> list[Kind]:
    """One rank of each kind.

    main: the role whose pipelines are rehearsed whole, so that messages between stages meet.
    busy_expert: whether one expert of each layer, the first, gets more tokens than the others. Not all ranks have it.
    """
    mesh = layouts[main]
    of_stages = _by_stages(layouts)
    kinds: dict[int, Kind] = {}
    for dp, why in _pipelines(layouts, main, shares).items():
        for pp in range(mesh.pp):
            rank = mesh.rank_at(dp=dp, pp=pp, cp=mesh.cp - 1)
            stages = stages_of(rank, layouts)
            kinds.setdefault(rank, Kind(rank, stages, len(of_stages[stages]), why))
    if busy_expert and mesh.ep > 1:
        for pp in range(mesh.pp):
            rank = mesh.rank_at(pp=pp)
            stages = stages_of(rank, layouts)
            kinds.setdefault(rank, Kind(rank, stages, len(of_stages[stages]), "the rank with the busiest expert"))
    covered = {kind.stages for kind in kinds.values()}
    for stages, ranks in of_stages.items():
        if stages not in covered:
            kinds[ranks[0]] = Kind(ranks[0], stages, len(ranks), "another combination of stages")
    return [kinds[rank] for rank in sorted(kinds)]


def named(ranks: Iterable[int], layouts: Mapping[str, MeshLayout]) -> list[Kind]:
    """The ranks that the user named."""
    of_stages = _by_stages(layouts)
    return [
        Kind(rank, (stages := stages_of(rank, layouts)), len(of_stages[stages]), "asked for")
        for rank in sorted(set(ranks))
    ]


def _by_stages(layouts: Mapping[str, MeshLayout]) -> dict[Stages, list[int]]:
    found: dict[Stages, list[int]] = {}
    for rank in range(next(iter(layouts.values())).world_size):
        found.setdefault(stages_of(rank, layouts), []).append(rank)
    return found


def _pipelines(layouts: Mapping[str, MeshLayout], main: str, shares: Shares) -> dict[int, str]:
    """Data-parallel ranks of the main role, each with the reason for its choice."""
    mesh = layouts[main]
    work = [_share_of(mesh.rank_at(dp=dp), layouts, shares) for dp in range(mesh.dp)]
    if mesh.dp == 1 or not shares:
        return {0: "the only data-parallel rank" if mesh.dp == 1 else "the first data-parallel rank"}
    by_cost = sorted(range(mesh.dp), key=lambda dp: work[dp].cost)
    found = {by_cost[-1]: "the data-parallel rank with the most work"}
    if work[by_cost[0]].cost < work[by_cost[-1]].cost:
        found[by_cost[0]] = "the data-parallel rank with the least work"
    # Only what is trained leaves activations.
    trained = {phase: by_dp for phase, by_dp in shares.items() if phase.startswith("train/")}
    longest = [_share_of(mesh.rank_at(dp=dp), layouts, trained).longest for dp in range(mesh.dp)]
    largest = max(range(mesh.dp), key=lambda dp: longest[dp])
    if longest[largest] > LARGER * max(longest[dp] for dp in found):
        found[largest] = "the data-parallel rank with the largest micro-batch"
    return found


def _share_of(rank: int, layouts: Mapping[str, MeshLayout], shares: Shares) -> RankLoad:
    """Work of a rank, summed over the phases of all roles."""
    total = RankLoad(0.0, 0, 0, 0)
    for phase, by_dp in shares.items():
        role = "reward_model" if phase == "reward" else phase.partition("/")[2]
        layout = layouts.get(role)
        if layout is not None and layout.dp == len(by_dp) and rank in layout.ranks:
            total += by_dp[layout.coordinates(rank).dp]
    return total


def pipelines_of(here: Iterable[int], mesh: MeshLayout) -> list[int]:
    """Ranks of `here` whose pipelines of a role are complete, so that their traces can be replayed together.

    A rank without the role is among them: no pipeline of its own can be cut.
    """
    here = set(here)
    whole = []
    for rank in sorted(here):
        if rank not in mesh.ranks:
            whole.append(rank)
            continue
        at = mesh.coordinates(rank)
        if all(mesh.rank_at(tp=at.tp, cp=at.cp, dp=at.dp, pp=pp) in here for pp in range(mesh.pp)):
            whole.append(rank)
    return whole
