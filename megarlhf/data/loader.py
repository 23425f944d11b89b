"""The order in which samples are used: a pure function of the seed and of how many were used before."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any


class ShuffledBatches:
    """Batches of sample indices, each epoch a new permutation of all samples.

    A batch may run over the border of two epochs: within an epoch nothing is dropped and nothing comes twice.
    What is kept in a resume point is where the next step begins, so that a run that goes on with another batch size
    neither leaves samples out nor uses some again.
    """

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
        """A step, and how many samples the steps before it use."""
        self._next_step = 0
        self._recent: dict[int, list[int]] = {}

    def indices(self, step: int) -> list[int]:
        """The sample indices of the batch of this step (from 0)."""
        assert step >= 0, f"steps count from 0, got {step}"
        start = self._start_of(step)
        self._next_step = step + 1
        positions = range(start, start + self.batch_size)
        return [self._order(p // self.num_samples)[p % self.num_samples] for p in positions]

    def state_dict(self) -> dict[str, Any]:
        """Where the step after the last one that was asked for begins."""
        return {"step": self._next_step, "position": self._start_of(self._next_step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._position = int(state["step"]), int(state["position"])
        self._next_step = self._step

    def _start_of(self, step: int) -> int:
        start = self._position + (step - self._step) * self.batch_size
        assert start >= 0, f"step {step} lies before the start of the data"
        return start

    def _order(self, epoch: int) -> list[int]:
        """The epoch's permutation; the last two are kept, as a batch may need both."""
        if epoch not in self._recent:
            order = list(range(self.num_samples))
            # A string, not seed + epoch: the second epoch of seed 0 is not the first of seed 1.
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._recent = {e: o for e, o in self._recent.items() if e == epoch - 1} | {epoch: order}
        return self._recent[epoch]
