"""Logical tensors out of what ranks hold of them, in the process of the tests: by placements, without a message."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarlhf.placement import RankPlacements

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Held:
    """What one rank holds of a model's parameters, or of their gradients."""

    placements: RankPlacements
    storages: Arrays
    """fp32, flat; NaN where an element is another rank's."""
    first_copy: tuple[bool, bool]
    """Whether this is the first of the ranks that hold the same part of the model: outside of experts, in them."""


def rebuilt(parts: Sequence[Held]) -> tuple[Arrays, dict[str, np.ndarray]]:
    """The tensors by their Hugging Face names, NaN where nobody holds an element; and how many ranks hold each.

    Raises: AssertionError where two ranks hold different bits of an element.
    """
    tensors: Arrays = {}
    copies: dict[str, np.ndarray] = {}
    for part in parts:
        for name, shape in part.placements.tensors.items():
            tensors.setdefault(name, np.full(shape, np.nan, np.float32))
            copies.setdefault(name, np.zeros(shape, np.int64))
        for at in part.placements.placements:
            flat = part.storages[at.storage]
            strides = tuple(stride * flat.itemsize for stride in at.strides)
            held = np.lib.stride_tricks.as_strided(flat[at.offset :], at.box.shape, strides)
            box = tuple(slice(start, stop) for start, stop in zip(at.box.start, at.box.stop, strict=True))
            is_held, known = ~np.isnan(held), copies[at.tensor][box] > 0
            both = is_held & known
            different = int((tensors[at.tensor][box][both] != held[both]).sum())
            assert not different, (
                f"{at.tensor}{at.box}: {different} elements of rank {part.placements.rank} have other bits elsewhere"
            )
            tensors[at.tensor][box] = np.where(is_held, held, tensors[at.tensor][box])
            copies[at.tensor][box] += is_held
    return tensors, copies


def gradients_of(parts: Sequence[Held]) -> Arrays:
    """Complete gradients, of which each element comes once from every copy of its part of the model."""
    tensors, copies = rebuilt(parts)
    expected = _copies_of_one_model(parts)
    assert expected.keys() == copies.keys()
    for name, times in copies.items():
        wrong = int((times != expected[name]).sum())
        assert not wrong, f"{name}: {wrong} of {times.size} elements of its gradient are missing or there too often"
    return tensors


def weights_of(parts: Sequence[Held]) -> Arrays:
    """Complete weights; replicas agree bit for bit."""
    tensors, copies = rebuilt(parts)
    for name, times in copies.items():
        assert times.min() > 0, f"{name}: {int((times == 0).sum())} of {times.size} elements are nobody's"
    return tensors


def _copies_of_one_model(parts: Sequence[Held]) -> dict[str, np.ndarray]:
    """How many ranks of one copy of the model hold each element: several where a tensor is not cut, or is tied."""
    times: dict[str, np.ndarray] = {}
    for part in parts:
        for name, shape in part.placements.tensors.items():
            times.setdefault(name, np.zeros(shape, np.int64))
        for at in part.placements.placements:
            if part.first_copy[".experts." in at.tensor]:
                times[at.tensor][tuple(map(slice, at.box.start, at.box.stop))] += 1
    assert all(each.min() > 0 for each in times.values()), "a copy of the model is not complete"
    return times
