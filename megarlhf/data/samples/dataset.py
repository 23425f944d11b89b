"""Sequences of samples in mapped files: all of a directory, a selection, or several joined.

A sample is made when it is requested. Lengths and other values of all samples are read from the files directly.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from megarlhf.data.samples.columns import DTYPES, PROMPT, RAGGED, RECORD, Array, decode_cell, kinds_of, read_manifest

Sample = TypeVar("Sample")


class Samples(Sequence[Sample], Generic[Sample]):
    """A sequence of samples on disk."""

    @abstractmethod
    def at(self, position: int) -> Sample:
        """The sample at a position, 0 <= position < len(self)."""

    @abstractmethod
    def lengths(self, name: str) -> Array:
        """[samples] lengths of the field of this name."""

    @abstractmethod
    def records(self) -> Array:
        """[samples] record numbers in the source, or in all sources one after the other."""

    @abstractmethod
    def prompts(self) -> Array:
        """[samples] digests of prompts."""

    @abstractmethod
    def digest(self) -> str:
        """Digest of all samples in their order."""

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
    """The samples of one directory, whose files are mapped (`columns`)."""

    def __init__(self, directory: Path, sample_type: type[Sample]) -> None:
        """Raises: ValueError for an incomplete or damaged directory."""
        self.manifest, self._directory, self._type = read_manifest(directory), directory, sample_type
        self._kinds = kinds_of(sample_type)
        self._names = [field.name for field in fields(sample_type)]  # type: ignore[arg-type]
        self._values = {name: self._mapped(f"{name}.bin", DTYPES[kind]) for name, kind in self._kinds.items()}
        ragged = (name for name, kind in self._kinds.items() if kind in RAGGED)
        self._offsets = {name: self._mapped(f"{name}.offsets", np.int64) for name in ragged}

    def _mapped(self, name: str, dtype: type[np.generic]) -> Array:
        file = self._directory / name
        return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype=dtype)

    def __len__(self) -> int:
        return int(self.manifest["num_samples"])

    def at(self, position: int) -> Sample:
        return self._type(**{name: self._cell(name, position) for name in self._names})

    def _cell(self, name: str, position: int) -> Any:
        if name not in self._offsets:
            return self._values[name][position].item()
        start, end = self._offsets[name][position : position + 2]
        return decode_cell(self._values[name][start:end], self._kinds[name])

    def lengths(self, name: str) -> Array:
        return np.diff(self._offsets[name])

    def records(self) -> Array:
        return self._values[f"_{RECORD}"]

    def prompts(self) -> Array:
        return self._values[f"_{PROMPT}"]

    def digest(self) -> str:
        return str(self.manifest["digest"])

    @property
    def num_records(self) -> int:
        """Number of records in the source, including skipped ones."""
        return int(self.manifest["num_records"])


class Selected(Samples[Sample]):
    """A selection of samples, in a given order."""

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
    """Several sequences, one after the other. With weights, batches draw from each by its weight
    (`order.batches_of`)."""

    def __init__(
        self, parts: Sequence[Samples[Sample]], records: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        """records: number of records of each source, so that record numbers of the whole are unique"""
        self.parts, self.weights = parts, weights
        self._ends = list(accumulate(map(len, parts)))
        self._first_records = [0, *accumulate(records)][:-1]

    def __len__(self) -> int:
        return self._ends[-1]

    def at(self, position: int) -> Sample:
        part = bisect_right(self._ends, position)
        before = self._ends[part] - len(self.parts[part])
        sample = self.parts[part].at(position - before)
        first: Any = self._first_records[part]
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
        # As in `MixedBatches`: 3 : 1 and 6 : 2 draw the same samples.
        weights = self.weights and [weight / sum(self.weights) for weight in self.weights]
        parts = [*(part.digest() for part in self.parts), *map(str, self._first_records), str(weights)]
        return hashlib.sha256("/".join(parts).encode()).hexdigest()


def lengths_of(samples: Sequence[Any], name: str) -> Array:
    """[samples] lengths of the field of this name, for samples on disk or in a list."""
    if isinstance(samples, Samples):
        return samples.lengths(name)
    return np.array([len(getattr(sample, name)) for sample in samples], dtype=np.int64)


def record_numbers(samples: Sequence[Any]) -> Array:
    """[samples] record numbers."""
    if isinstance(samples, Samples):
        return samples.records()
    return np.array([sample.index for sample in samples], dtype=np.int64)


def by_record(samples: Sequence[Sample]) -> Callable[[int], Sample]:
    """A function that finds a record's sample. It raises KeyError for a record without one."""
    records = record_numbers(samples)
    order = np.argsort(records, kind="stable")
    ordered = records[order]

    def find(record: int) -> Sample:
        index = int(np.searchsorted(ordered, record))
        if index == len(ordered) or ordered[index] != record:
            raise KeyError(f"no sample of record {record}")
        return samples[int(order[index])]

    return find


def positions_of_shared(samples: Samples[Any], others: Samples[Any]) -> Array:
    """Positions of `samples` whose prompt also occurs in `others`."""
    return np.flatnonzero(np.isin(samples.prompts(), others.prompts()))
