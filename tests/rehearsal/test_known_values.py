"""Numbers of device tensors that follow from known ones: alone, and in a world in which all ranks say the same."""

import gc
import pickle

import torch
import torch.distributed as dist

from megarlhf.rehearsal.fake_device.known_values import LARGEST_MADE
from megarlhf.rehearsal.fake_device.torch_patches import storage_key
from tests.rehearsal.devices import a_device, a_rank, unknown

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


def test_sums_and_maxima_of_ranks_that_say_the_same() -> None:
    with a_rank(1, 4) as device:
        counts = torch.tensor([3, 5]).to(HERE)
        dist.all_reduce(counts)
        assert device.known.twin(counts).tolist() == [12, 20]
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        assert device.known.twin(counts).tolist() == [12, 20]
        gathered = torch.empty(8, dtype=torch.int64, device=HERE)
        dist.all_gather_into_tensor(gathered, counts)
        assert device.known.twin(gathered).tolist() == [12, 20] * 4
        dist.all_reduce(counts, op=dist.ReduceOp.PRODUCT)
        assert device.known.twin(counts) is None


def test_what_comes_from_others_is_unknown() -> None:
    """Received, reduced and scattered, or gathered from unknown numbers."""
    with a_rank(1, 2) as device:
        first, second = (torch.ones(2, device=HERE) for _ in range(2))
        dist.recv(first, 0)
        assert device.known.twin(first) is None
        half = torch.ones(1, device=HERE)
        dist.reduce_scatter_tensor(half, second)
        assert device.known.twin(half) is None
        whole = torch.ones(4, device=HERE)
        dist.all_gather_into_tensor(whole, unknown(2))
        assert device.known.twin(whole) is None


def test_objects_of_rank_0() -> None:
    """A rehearsed rank hears what it would say itself, or what it is told that rank 0 says."""
    with a_rank(1, 2) as device:
        said = ["mine"]
        dist.broadcast_object_list(said, 0)
        assert said == ["mine"]
        said_bytes = 8 + len(pickle.dumps("mine"))
        heard: list[object] = [None, None]
        dist.all_gather_object(heard, "mine")
        assert heard == ["mine", "mine"]
        heard = ["theirs, which is longer", "mine"]
        dist.all_gather_object(heard, "mine")
        assert heard == ["theirs, which is longer", "mine"]
        nbytes = device.wire.nbytes.total()
        assert nbytes == 2 * 8 + 2 * len(pickle.dumps("mine")) + 2 * 8 + 2 * len(pickle.dumps(heard[0])) + said_bytes
        got: list[object] = [None]
        dist.scatter_object_list(got, None, 0)
        assert got == ["what rank 0 says"]
        operations = [line.operation for line, count in device.wire.counts.items() for _ in range(count)]
    assert sorted(operations) == ["all_gather"] * 4 + ["broadcast"] * 3 + ["scatter"] * 2
