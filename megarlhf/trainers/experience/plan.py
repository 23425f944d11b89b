"""Plan of a step: its mini-batches, and the micro-batches in which each role computes them.

A plan follows from lengths, prompts and seed alone, so every rank makes the same one. The plan of what a step trains on
is made once (`rl.update.plan_step`), when its samples are chosen, and handed to the stages; a run that resumes inside a
step makes it again. Reward models and the table of held-out samples have plans of their own (`StepPlan.whole`): rewards
may choose the samples, and a reward model may read them in other tokens.

Legend: N samples of the step, W ranks of the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import torch

from megarlhf.columns import ColumnSharding, Traffic
from megarlhf.config import MicroBatchConfig, Shuffle
from megarlhf.experience import Experience
from megarlhf.models.role import Role
from megarlhf.parallel.batching import Batching
from megarlhf.parallel.micro_batch import MicroBatchLayout, prompts_computed


class StepPlan:
    """Mini-batches of a step, as global sample indices, and their micro-batches by role.

    Example: with 8 samples, mini-batches of 4 and two passes over the samples, `passes` may be
    [[[0, 1, 2, 3], [4, 5, 6, 7]], [[2, 3, 6, 7], [0, 1, 4, 5]]] and `updates` has its four mini-batches in order.
    """

    def __init__(
        self, experience: Experience, micro: MicroBatchConfig, passes: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        self.passes = passes
        self._micro, self._num_samples = micro, experience.num_samples
        self._prompts, self._prompt_numbers = experience.prompts, experience.prompt_numbers_N.tolist()
        self._lengths_N = experience.sequences.lengths_N
        self._by_rank: dict[Hashable, list[list[MicroBatchLayout]]] = {}

    @classmethod
    def whole(cls, experience: Experience, micro: MicroBatchConfig) -> StepPlan:
        """Plan to compute all samples of a table once, as one mini-batch, for scores that no training follows."""
        return cls(experience, micro, [[range(experience.num_samples)]])

    @property
    def mini_batches(self) -> Sequence[Sequence[int]]:
        """Mini-batches of the first pass."""
        return self.passes[0]

    @property
    def updates(self) -> list[Sequence[int]]:
        """Mini-batches of all passes, in the order in which they are trained on."""
        return list(itertools.chain.from_iterable(self.passes))

    def layouts_by_rank(self, role: Role, mini_batches: Sequence[Sequence[int]]) -> list[list[MicroBatchLayout]]:
        """Micro-batches of `mini_batches` one after the other, of every data-parallel rank of the role."""
        by_mini_batch = [self._layouts(role.batching(self._micro), samples) for samples in mini_batches]
        return [list(itertools.chain.from_iterable(of_rank)) for of_rank in zip(*by_mini_batch, strict=True)]

    def own_layouts(self, role: Role, mini_batches: Sequence[Sequence[int]]) -> list[MicroBatchLayout]:
        """Micro-batches of this data-parallel rank, which it is about to compute."""
        batching = role.batching(self._micro)
        own = [batching.own(self._layouts(batching, samples)) for samples in mini_batches]
        return list(itertools.chain.from_iterable(own))

    def shares_prompts(self, role: Role) -> bool:
        """Whether the role computes a prompt once for all its samples in a micro-batch."""
        return role.batching(self._micro).shares

    def prompts_computed(self, role: Role, samples: Sequence[int]) -> dict[str, float]:
        """How many prompts a pass of the role over a mini-batch computes and spares."""
        computed, saved = prompts_computed(self.layouts_by_rank(role, [samples]))
        return {"prompts_computed": float(computed), "prompts_saved": float(saved)}

    def sharding(self, trained: Sequence[Role]) -> ColumnSharding | None:
        """Placement of the token columns on the ranks that need them. These are the last pipeline stages that compute a
        loss of a sample, for any trained role in any pass. None where every rank needs all columns."""
        world_size = trained[0].mesh.runtime.world_size
        if world_size == 1:
            return None
        resident_WN = torch.zeros(world_size, self._num_samples, dtype=torch.bool)
        for role in trained:
            for dp, layouts in enumerate(self.layouts_by_rank(role, self.updates)):
                samples = [n for layout in layouts for n in layout.sequences]
                for rank in role.mesh.last_stage(dp):
                    resident_WN[rank, samples] = True
        return None if bool(resident_WN.all()) else ColumnSharding(resident_WN, Traffic(world_size))

    def _layouts(self, batching: Batching, samples: Sequence[int]) -> list[list[MicroBatchLayout]]:
        """Micro-batches of one mini-batch, planned once for all roles that pack alike."""
        key = (batching.mesh.layout, batching.cost, batching.shares, *samples)
        if key not in self._by_rank:
            groups, shared = self._groups(batching, samples)
            self._by_rank[key] = batching.layouts_by_rank(groups, self._lengths_N, shared=shared, divisible=True)
        return self._by_rank[key]

    def _groups(self, batching: Batching, samples: Sequence[int]) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
        """Samples of each prompt, and the prompt's number of tokens. Equal prompts with different numbers stay apart.
        Without sharing, each sample is a group of its own."""
        if not batching.shares:
            return [(n,) for n in samples], ()
        groups: dict[int, list[int]] = {}
        for n in samples:
            group = groups.setdefault(self._prompt_numbers[n], [])
            assert not group or torch.equal(self._prompts[group[0]], self._prompts[n]), (
                f"samples {group[0]} and {n}: two prompts"
            )
            group.append(n)
        return list(groups.values()), [len(self._prompts[group[0]]) for group in groups.values()]


def split_into_mini_batches(groups: Sequence[int], size: int, *, shuffle: Shuffle, seed: int) -> list[list[int]]:
    """The samples of a step split into mini-batches of global sample indices, the same on every rank.

    groups: number of each sample's prompt. With `shuffle = "groups"` the prompts come in random order and the samples
    of each stay in their order; a prompt at the boundary of two mini-batches is divided between them.
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
