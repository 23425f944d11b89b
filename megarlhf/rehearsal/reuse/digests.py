"""Reuse of equal digests: digests of one box, in memory of one shape, take the same operations.

A certificate checks each weight by itself, and a mixture of experts has thousands. The first digest of a box makes its
keys, the second is recorded, and later ones play its tape. Tests compare rehearsals with and without this: nothing
changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megarlhf.placement import Placement
from megarlhf.rehearsal.fake_device.torch_patches import FakeTensor
from megarlhf.rehearsal.reuse.tape import Player, Tape, TapeRecorder
from megarlhf.weights.checks import digest
from megarlhf.weights.transport.storages import Storages


@contextlib.contextmanager
def equal_digests(recorder: TapeRecorder, player: Player) -> Iterator[None]:
    """Scope in which a digest is played if two equal ones have run."""
    run = digest._digest_box
    tapes: WeakKeyDictionary[Any, dict[Any, Tape | None]] = WeakKeyDictionary()
    """Tapes by the keys of boxes, which are made anew for each certificate."""

    def digest_box(placement: Placement, storages: Storages, dtype: torch.dtype, keys: Any) -> Tensor:
        live = storages[placement.storage]
        if not isinstance(live, FakeTensor):
            return run(placement, storages, dtype, keys)
        of_keys = tapes.setdefault(keys, {})
        kind = placement.box, placement.strides, live.shape, live.stride(), live.dtype, dtype
        if kind not in of_keys:
            of_keys[kind] = None
            return run(placement, storages, dtype, keys)
        tape = of_keys[kind]
        if tape is not None:
            (total,), kept = player.play(tape, {})
            assert not kept, "a digest holds memory after it"
            return total
        of_keys[kind] = tape = recorder.begin({})
        try:
            total = run(placement, storages, dtype, keys)
            tape.set_results(total)
        finally:
            recorder.end()
        return total

    with patch.object(digest, "_digest_box", digest_box):
        yield
