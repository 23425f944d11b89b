"""Numbers of device tensors that follow from known ones. Not covered: collectives, for which see `test_truth.py`."""

from __future__ import annotations

import gc

import torch

from megarlhf.rehearsal.known import LARGEST_MADE, storage_key
from tests.rehearsal.devices import a_device, unknown

HERE = torch.device("cpu", 0)


def test_what_is_made_of_known_numbers_is_known() -> None:
    """Masks, positions and counts, through views and writes in place."""
    with a_device() as device:
        lengths = torch.tensor([3, 1, 2]).to(HERE)
        columns = torch.arange(4, device=HERE)
        mask = columns < lengths.unsqueeze(1)
        row = mask[2]
        row.logical_not_()  # writes into the mask too
        assert device.known.twin(mask).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 1, 1]]
        assert mask.sum().item() == 6
        assert mask.nonzero().shape == (6, 2)
        assert unknown(3, 4)[mask].shape == (6,)
        assert unknown(3, 4).masked_select(mask).shape == (6,)


def test_a_twin_is_not_the_memory_of_the_program() -> None:
    """A host tensor that is moved and then changed is another one than what the device got."""
    with a_device() as device:
        tokens = torch.tensor([1, 2, 3])
        moved = tokens.to(HERE)
        tokens.fill_(0)
        assert device.known.twin(moved).tolist() == [1, 2, 3]
        back = moved.cpu()
        back.fill_(9)
        assert device.known.twin(moved).tolist() == [1, 2, 3]


def test_what_unknown_numbers_are_written_into_is_unknown() -> None:
    """The whole storage, with all its views."""
    with a_device() as device:
        counter = torch.zeros(4, device=HERE)
        part = counter[:2]
        assert device.known.twin(part) is not None
        counter[3:].copy_(unknown(1))
        assert device.known.twin(counter) is None
        assert device.known.twin(part) is None


def test_shapes_say_nothing_of_numbers_but_zeros_of_a_shape_are_zeros() -> None:
    with a_device() as device:
        made = torch.zeros_like(unknown(5))
        assert device.known.twin(made).tolist() == [0.0] * 5
        assert device.known.twin(torch.rand(5, device=HERE)) is None
        assert device.known.twin(torch.empty_like(made)) is None
        assert device.known.twin(torch.zeros(LARGEST_MADE + 1, device=HERE)) is None
        assert device.known.twin(torch.zeros(LARGEST_MADE + 1, dtype=torch.int64, device=HERE)) is not None


def test_a_freed_storage_is_forgotten() -> None:
    """Its key may be that of another one soon."""
    with a_device() as device:
        made = torch.ones(3, device=HERE)
        key = storage_key(made)
        assert key in device.known._storages
        del made
        gc.collect()
        assert key not in device.known._storages
