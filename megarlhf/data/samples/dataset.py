"""Samples that lie in mapped files, as a sequence that makes each of them when it is asked for; parts and several such.

What is asked of all of them at once, lengths above all, comes from the files without making samples.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Generic, TypeVar, overload

import numpy as np

from megarlhf.data.samples.columns import Array, Columns

Sample = TypeVar("Sample")


class Samples(Sequence[Sample], Generic[Sample]):
    """A sequence of samples on disk."""

    @abstractmethod
    def at(self, position: int) -> Sample:
        """The sample there, 0 <= position < len(self)."""

    @abstractmethod
    def lengths(self, name: str) -> Array:
        """[samples] of the field of this name."""

    @abstractmethod
    def records(self) -> Array:
        """[samples] the record of each in its source, or in its sources one after the other."""

    @abstractmethod
    def prompts(self) -> Array:
        """[samples] digests of prompts."""

    @abstractmethod
    def digest(self) -> str:
        """Of all samples in their order."""

    @overload
    def __getitem__(self, position: int) -> Sample: ...

    @overload
    def __getitem__(self, position: slice) -> Samples[Sample]: ...

    def __getitem__(self, position: int | slice) -> Sample | Samples[Sample]:
        if isinstance(position, slice):
            chosen = np.arange(len(self))[position]
            return self if len(chosen) == len(self) and (position.step or 1) > 0 else Selected(self, chosen)
        number = position + len(self) if position < 0 else int(position)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        return self.at(number)


class Stored(Samples[Sample]):
    """All samples of one directory."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return self.columns.num_samples

    def at(self, position: int) -> Sample:
        sample: Sample = self.columns.sample(position)
        return sample

    def lengths(self, name: str) -> Array:
        return self.columns.lengths(name)

    def records(self) -> Array:
        return self.columns.records()

    def prompts(self) -> Array:
        return self.columns.prompts()

    def digest(self) -> str:
        return str(self.columns.manifest["digest"])

    @property
    def num_records(self) -> int:
        """Of the source, with those that were skipped."""
        return int(self.columns.manifest["num_records"])


class Selected(Samples[Sample]):
    """Some of the samples."""

    def __init__(self, base: Samples[Sample], positions: Array) -> None:
        self._base, self._positions = base, positions

    def __len__(self) -> int:
        return len(self._positions)

    def at(self, position: int) -> Sample:
        return self._base.at(int(self._positions[position]))

    def lengths(self, name: str) -> Array:
        return np.asarray(self._base.lengths(name)[self._positions])

    def records(self) -> Array:
        return np.asarray(self._base.records()[self._positions])

    def prompts(self) -> Array:
        return np.asarray(self._base.prompts()[self._positions])

    def digest(self) -> str:
        chosen = np.ascontiguousarray(self._positions, dtype=np.int64).tobytes()
        return hashlib.sha256(self._base.digest().encode() + chosen).hexdigest()


class Joined(Samples[Sample]):
    """Several, one after the other. With weights each of them is drawn from by its own (`loader.batches_of`)."""

    def __init__(
        self, parts: Sequence[Samples[Sample]], records: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        """records: how many each source has, so that the number of a record says which source it is of."""
        self.parts, self.weights = parts, weights
        self._ends = list(accumulate(map(len, parts)))
        self._first_records = [0, *accumulate(records)][:-1]

    def __len__(self) -> int:
        return self._ends[-1]

    def at(self, position: int) -> Sample:
        number = bisect_right(self._ends, position)
        before = self._ends[number] - len(self.parts[number])
        sample = self.parts[number].at(position - before)
        first: Any = self._first_records[number]
        return replace(sample, index=sample.index + first) if first and hasattr(sample, "index") else sample  # type: ignore[type-var]

    def lengths(self, name: str) -> Array:
        return np.concatenate([part.lengths(name) for part in self.parts])

    def records(self) -> Array:
        return np.concatenate(
            [part.records() + first for part, first in zip(self.parts, self._first_records, strict=True)]
        )

    def prompts(self) -> Array:
        return np.concatenate([part.prompts() for part in self.parts])

    def digest(self) -> str:
        # As `loader.MixedBatches` has them: 3 : 1 and 6 : 2 draw the same samples.
        weights = self.weights and [weight / sum(self.weights) for weight in self.weights]
        said = [*(part.digest() for part in self.parts), *map(str, self._first_records), str(weights)]
        return hashlib.sha256("/".join(said).encode()).hexdigest()


def lengths_of(samples: Sequence[Any], name: str) -> Array:
    """[samples] of the field of this name, of samples on disk or in a list."""
    if isinstance(samples, Samples):
        return samples.lengths(name)
    return np.array([len(getattr(sample, name)) for sample in samples], dtype=np.int64)


def records_of(samples: Sequence[Any]) -> Array:
    """[samples] the record of each."""
    if isinstance(samples, Samples):
        return samples.records()
    return np.array([sample.index for sample in samples], dtype=np.int64)


def by_record(samples: Sequence[Sample]) -> Callable[[int], Sample]:
    """Finds the sample of a record."""
    records = records_of(samples)
    order = np.argsort(records, kind="stable")
    ordered = records[order]

    def find(record: int) -> Sample:
        place = int(np.searchsorted(ordered, record))
        if place == len(ordered) or ordered[place] != record:
            raise KeyError(f"no sample of record {record}")
        return samples[int(order[place])]

    return find


def positions_of_shared(samples: Samples[Any], others: Samples[Any]) -> Array:
    """Of those of `samples` whose prompt is a prompt of `others` too."""
    return np.flatnonzero(np.isin(samples.prompts(), others.prompts()))
