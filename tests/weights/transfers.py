"""Random transfers from a trainer's mesh into rollout engines, and their element counts made without the plan."""

from __future__ import annotations

import random as stdlib_random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import logical_tensors, padded_vocab_size, vllm_placements
from megarlhf.layout import MeshLayout, engine_order
from megarlhf.placement import Box, RankPlacements
from tests.weights.cases import Live, fill_from_logical, random_logical
from tests.weights.families import CONFIGS, architecture

FAMILIES = tuple(name for name in CONFIGS if name != "qwen3_biases")
"""vLLM's Qwen3 has no bias where that one has."""
STAGES = {1: [None], 2: [None, (1, 3), (3, 1)], 4: [None]}


@dataclass(frozen=True)
class Transfer:
    """Four layers of a family on at most 16 ranks; vocabularies of 100, padded to 128 x tp and to 64 x 2."""

    arch: Architecture
    mesh: MeshLayout
    trainer: MegatronLayout
    engine_tp: int
    ranks_per_node: int
    sources: list[RankPlacements]
    destinations: list[RankPlacements]

    @property
    def node_of(self) -> list[int]:
        return [rank // self.ranks_per_node for rank in range(self.mesh.world_size)]

    def live_sources(self, logical: dict[str, torch.Tensor]) -> Live:
        """The sources' storages with the model's values, padding -1."""
        return filled(self.sources, logical)

    def replicas(self) -> list[list[int]]:
        """Ranks that hold the same: they differ in data parallelism only."""
        alike: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.mesh.world_size):
            at = self.mesh.coordinates(rank)
            alike.setdefault((at.tp, at.pp, at.dp % self.trainer.ep), []).append(rank)
        return list(alike.values())

    def largest_row(self) -> int:
        """Elements of the largest row of a placement; a vector is one row."""
        boxes = {placement.box for part in self.sources for placement in part.placements}
        return max(box.numel // (box.shape[0] if len(box.shape) > 1 else 1) for box in boxes)


def transfer(
    arch: Architecture, trainer: MegatronLayout, dp: int, engine_tp: int, *, order=None, ranks_per_node: int = 8
) -> Transfer:
    mesh = MeshLayout(tp=trainer.tp, pp=trainer.pp, dp=dp, order=order)
    shards = [vllm_placements(arch, tp=engine_tp, tp_rank=v, rank=v) for v in range(engine_tp)]
    wanted = [shards[rank % engine_tp].on_rank(rank) for rank in range(mesh.world_size)]
    return Transfer(arch, mesh, trainer, engine_tp, ranks_per_node, trainer.on_ranks(arch, mesh), wanted)


def draw_transfer(random: stdlib_random.Random, *, family: str | None = None) -> Transfer:
    """Any family, TP, PP (even, uneven, virtual), DP, EP, engine size and order of ranks."""
    arch = architecture(family or random.choice(FAMILIES))
    tp, pp = random.choice([1, 2, 4]), random.choice([1, 2, 4])
    dp = random.choice([n for n in (1, 2, 4) if tp * pp * n <= 16])
    ep = random.choice([n for n in (1, 2, 4) if dp % n == 0]) if arch.num_experts else 1
    stages = random.choice(STAGES[pp])
    vpp = random.choice([1, 2]) if pp == 2 and stages is None else 1
    trainer = MegatronLayout(
        tp=tp, pp=pp, vpp=vpp, ep=ep, layers_per_stage=stages, padded_vocab=padded_vocab_size(arch.vocab_size, tp)
    )
    world = tp * pp * dp
    engine_tp = random.choice([n for n in (1, 2, 4) if world % n == 0])
    ranks_per_node = random.choice([n for n in (1, 2, 4, 8, 16) if world % n == 0])
    order = random.choice(
        [
            None,
            engine_order(MeshLayout(tp=tp, pp=pp, dp=dp), engine_tp, ranks_per_node),
            tuple(random.sample(range(world), world)),
        ]
    )
    return transfer(arch, trainer, dp, engine_tp, order=order, ranks_per_node=ranks_per_node)


def filled(parts: Sequence[RankPlacements], logical: dict[str, torch.Tensor], padding: float = -1.0) -> Live:
    """Storages of every rank written from the logical tensors by plain slicing."""
    live = {
        part.rank: {n: torch.full(s, padding, dtype=torch.float64) for n, s in part.storages.items()} for part in parts
    }
    for part in parts:
        fill_from_logical(part, live[part.rank], logical)
    return live


def logical_of(case: Transfer) -> dict[str, torch.Tensor]:
    return random_logical(case.arch)


class Masks:
    """Which elements of each logical tensor some ranks hold: one flag per element, set by slicing."""

    def __init__(self, arch: Architecture, parts: Iterable[RankPlacements]) -> None:
        self.flags = {name: np.zeros(shape, dtype=bool) for name, shape in logical_tensors(arch).items()}
        for part in parts:
            for placement in part.placements:
                self.flags[placement.tensor][_index(placement.box)] = True

    def lacking(self, wanted: Masks) -> int:
        return sum(int((flags & ~self.flags[name]).sum()) for name, flags in wanted.flags.items())


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def with_order(case: Transfer, order: tuple[int, ...] | None) -> Transfer:
    mesh = replace(case.mesh, order=order)
    return replace(case, mesh=mesh, sources=case.trainer.on_ranks(case.arch, mesh))
