"""The order of the samples: a pure function of the seed and of the number of samples used before."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from megarlhf.config import SourceConfig
from megarlhf.data.samples.dataset import Joined


class ShuffledBatches:
    """Batches of sample indices. Each epoch is a new permutation of all samples.

    A batch may span two epochs: within an epoch no sample is dropped or repeated. A resume point keeps the position
    at which the next step begins, so a run can continue with another batch size without leaving out or repeating
    samples.
    """

    name = "order"
    """Name of its state in a resume point."""

    def __init__(self, num_samples: int, batch_size: int, seed: int, key: str = "batch_size") -> None:
        if num_samples < 1 or batch_size < 1:
            raise ValueError(f"expected at least one sample and one a batch, got {num_samples=}, {batch_size=}")
        if batch_size > num_samples:
            raise ValueError(
                f"{key} = {batch_size}: a batch would hold some of the {num_samples} samples of data.train twice; "
                f"set {key} to at most {num_samples}, or give more data"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self._step, self._position = 0, 0
        """A step, and the number of samples used before it."""
        self._next_step = 0
        self._permutations = Permutations(num_samples, str(seed))

    def indices(self, step: int) -> list[int]:
        """The sample indices of the batch of this step (from 0). Looking ahead changes nothing that is saved."""
        assert step >= 0, f"steps count from 0, got {step}"
        start = self._start_of(step)
        return self._at(start, start + self.batch_size)

    def take(self, step: int) -> list[int]:
        """`indices`, of a step that begins: a resume point that is written from here on continues behind it."""
        self._next_step = step + 1
        return self.indices(step)

    def _at(self, start: int, end: int) -> list[int]:
        """The samples at these positions of the run."""
        return [self._permutations.at(position) for position in range(start, end)]

    def state_dict(self) -> dict[str, Any]:
        """Where the step after the last one that was taken begins."""
        return {"step": self._next_step, "position": self._start_of(self._next_step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._position = int(state["step"]), int(state["position"])
        self._next_step = self._step

    def _start_of(self, step: int) -> int:
        start = self._position + (step - self._step) * self.batch_size
        assert start >= 0, f"step {step} is before the start of the data"
        return start


class Permutations:
    """Repeated passes over samples, each in an order of its own."""

    def __init__(self, num_samples: int, seed: str) -> None:
        self._num_samples, self._seed = num_samples, seed
        self._recent: dict[int, array[int]] = {}

    def at(self, position: int) -> int:
        """The sample at a position, counted over all passes."""
        return self._order(position // self._num_samples)[position % self._num_samples]

    def _order(self, epoch: int) -> array[int]:
        """The permutation of a pass. The last two are kept, as a batch may need both."""
        if epoch not in self._recent:
            order = array("q", range(self._num_samples))
            # A string, not seed + epoch: the second epoch of seed 0 is not the first of seed 1.
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._recent = {e: o for e, o in self._recent.items() if e == epoch - 1} | {epoch: order}
        return self._recent[epoch]


class MixedBatches(ShuffledBatches):
    """Batches from several sets by their weights. After any number of samples each set has given its share, to within
    one or two. Each set has passes of its own: after all its samples were drawn it begins again in another order.

    The n-th sample of a set is due at (n + 1/2) / weight, and samples come in the order in which they are due. So the
    samples of a step follow from seed, weights and position alone.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int, key: str = "batch_size"
    ) -> None:
        super().__init__(sum(sizes), batch_size, seed, key)
        self._weights = np.array(weights, dtype=np.float64) / sum(weights)
        self._starts = [0, *accumulate(sizes)][:-1]
        self._sizes = list(sizes)
        self._passes = [Permutations(size, f"{seed}/set {index}") for index, size in enumerate(sizes)]
        for index, (size, weight) in enumerate(zip(sizes, self._weights, strict=True)):
            if (share := int(np.ceil(weight * batch_size))) > size:
                raise ValueError(
                    f"{key} = {batch_size}: set {index + 1} of data.train gives {share} samples of a batch by its "
                    f"weight, and has {size}: some would be in it twice; lower {key} or its weight, or give more data"
                )

    def _at(self, start: int, end: int) -> list[int]:
        sets, numbers = self._due(start, end)
        return [self._starts[k] + self._passes[k].at(n) for k, n in zip(sets.tolist(), numbers.tolist(), strict=True)]

    def _due(self, start: int, end: int) -> tuple[Any, Any]:
        """[end - start] set and number within the set of the samples at these positions."""
        reach = len(self._weights) + 1.0
        first_K = self._before(max(0.0, start - reach))
        last_K = self._before(end + reach)
        sets = np.concatenate([np.full(b - a, k) for k, (a, b) in enumerate(zip(first_K, last_K, strict=True))])
        numbers = np.concatenate([np.arange(a, b) for a, b in zip(first_K, last_K, strict=True)])
        order = np.lexsort((sets, (numbers + 0.5) / self._weights[sets]))
        skipped = start - int(first_K.sum())
        chosen = order[skipped : skipped + end - start]
        assert skipped >= 0, "the reach is too short"
        assert len(chosen) == end - start, "the reach is too short"
        return sets[chosen], numbers[chosen]

    def _before(self, time: float) -> Any:
        """[sets] number of samples that are due before a time."""
        return np.ceil(self._weights * time - 0.5).clip(min=0).astype(np.int64)

    def passes(self, num_steps: int) -> list[tuple[int, float]]:
        """For each set, the number of samples that the steps draw, and the number of passes over it."""
        total = num_steps * self.batch_size
        counts = [round(weight * total) for weight in self._weights]
        return [(count, count / size) for count, size in zip(counts, self._sizes, strict=True)]


def batches_of(samples: Sequence[Any], batch_size: int, seed: int, key: str) -> ShuffledBatches:
    """The order for these samples: by weights of several sets, or of all alike. Raises: ValueError for a batch that
    would hold a sample twice."""
    if isinstance(samples, Joined) and samples.weights is not None:
        return MixedBatches([len(part) for part in samples.parts], samples.weights, batch_size, seed, key)
    return ShuffledBatches(len(samples), batch_size, seed, key)


def describe_mixture(order: object, num_steps: int, sources: Sequence[SourceConfig]) -> list[str]:
    """Sentences on what a run draws from each set. Empty for sets without weights."""
    if not isinstance(order, MixedBatches):
        return []
    total = num_steps * order.batch_size
    return [
        f"{source.words}: {count} of the {total} samples of {num_steps} steps, {passes:.2f} passes over it"
        for source, (count, passes) in zip(sources, order.passes(num_steps), strict=True)
    ]
