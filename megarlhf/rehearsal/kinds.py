"""Which ranks are rehearsed: one of each kind.

Ranks are of one kind when they hold the same stages of every role and their collectives are alike. Tensor-parallel
neighbours are, and context-parallel ones but for the partial outputs of TransformerEngine's ring, of which the last has
the most: it is taken. Data-parallel ranks differ in how long their sequences are, so of them those with the most and
the least work are taken, and the one that trains the largest micro-batch. Which positions of it predict responses is
not asked: where logits are large, another rank may need more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megarlhf.layout import MeshLayout
from megarlhf.rehearsal.fakes.batches import RankLoad, Shares

LARGER = 1.01
"""A micro-batch that is larger by less is not rehearsed for its memory."""

Stages = tuple[tuple[str, int | None], ...]
"""Role and pipeline stage; None: the rank has nothing of the role."""


@dataclass(frozen=True)
class Kind:
    """A rank that stands for others."""

    rank: int
    stages: Stages
    stands_for: int
    """Ranks with the same stages, itself among them."""
    why: str
    """In words."""


def stages_of(rank: int, layouts: Mapping[str, MeshLayout]) -> Stages:
    return tuple(
        (role, layout.coordinates(rank).pp if rank in layout.ranks else None) for role, layout in layouts.items()
    )


def first_rank(layouts: Mapping[str, MeshLayout], main: str) -> int:
    """The rank that is rehearsed first, and says how much work each has."""
    return layouts[main].rank_at(cp=layouts[main].cp - 1)


def chosen(layouts: Mapping[str, MeshLayout], main: str, shares: Shares, *, busy_expert: bool = False) -> list[Kind]:
    """One rank of each kind.

    main: the role whose pipelines are rehearsed whole, so that its messages meet
    busy_expert: one expert of a layer gets more tokens than the others: the first one, which not all ranks have
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
    """The ranks that the user asks for."""
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
    """Data-parallel ranks of the main role, each with the reason."""
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
    """Of a rank, over the phases of all roles."""
    total = RankLoad(0.0, 0, 0, 0)
    for phase, by_dp in shares.items():
        role = "reward_model" if phase == "reward" else phase.partition("/")[2]
        layout = layouts.get(role)
        if layout is not None and layout.dp == len(by_dp) and rank in layout.ranks:
            total += by_dp[layout.coordinates(rank).dp]
    return total


def pipelines_of(here: Iterable[int], mesh: MeshLayout) -> list[int]:
    """Of these ranks those whose pipelines of a role are there whole: whose traces can be replayed together. A rank
    that has nothing of the role is in none that could be cut."""
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
