"""`torch_dist` checkpoints that are damaged, or that were made to do harm."""

import pickle
import shutil

import pytest
import torch

from megarlhf.weights.checkpoint.formats.torch_dist.metadata import read_tensors
from megarlhf.weights.checkpoint.formats.torch_dist.read import read_torch_dist
from tests.refuses import refuses
from tests.weights.torch_dist import assert_same, read, tiny_checkpoint


@pytest.fixture
def written(tmp_path):
    return tiny_checkpoint(tmp_path / "run")


def test_missing_and_truncated_files(written, tmp_path):
    arch, _, directory = written
    for name, names in {
        "__1_0.distcp": "1 of 2 files|__1_0.distcp", ".metadata": ".metadata|cannot be read",
        "common.pt": "neither common.pt nor|common_state/shard_0_1", "metadata.json": "metadata.json|not finished",
    }.items():  # fmt: skip
        copy = tmp_path / "copy"
        shutil.copytree(directory, copy)
        (copy / name).unlink()
        with refuses(*names.split("|")):
            read_torch_dist(copy, arch)
        size = (directory / name).stat().st_size
        for keep in (0, size // 2, size - 1):
            (copy / name).write_bytes((directory / name).read_bytes()[:keep])
            with pytest.raises(ValueError, match=r"truncated|damaged"):
                read_torch_dist(copy, arch)
        shutil.rmtree(copy)
    (directory / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with refuses("backend 'zarr'"):
        read_torch_dist(directory, arch)


def test_flipped_bits_of_the_metadata_are_found_or_harmless(written):
    """Any bit flipped: a ValueError, when opened or planned, or the same tensors. Every 29th byte, one bit each."""
    arch, logical, directory = written
    path = directory / ".metadata"
    good = path.read_bytes()
    num_refused = 0
    for at in range(0, len(good), 29):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bytes(bad))
        try:
            got = read(directory, arch)
        except ValueError:
            num_refused += 1
        else:
            assert_same(got, logical)
    assert num_refused > len(good) // 29 // 4


class Evil:
    def __reduce__(self):
        return print, ("code was run",)


def test_another_class_is_refused_by_name(written, capsys):
    arch, _, directory = written
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    metadata.planner_data = Evil()
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with refuses("builtins.print", "allow-list"):
        read_torch_dist(directory, arch)
    metadata.planner_data = torch.nn.Linear  # records elsewhere, not here
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with refuses("torch.nn.modules.linear.Linear", "allow-list"):
        read_torch_dist(directory, arch)
    assert capsys.readouterr().out == ""


def test_paths_outside_the_directory_are_refused(written):
    arch, _, directory = written
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../__0_0.distcp"
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with refuses("../__0_0.distcp", "directory"):
        read_torch_dist(directory, arch)


def test_blobs_of_other_writers_are_read_one_by_one(written, monkeypatch):
    arch, logical, directory = written
    tensors = read_tensors(directory)
    first, second = (shard.blob for shard in tensors["decoder.layers.mlp.linear_fc2.weight"].shards[:2])
    assert first.length == second.length
    raw = bytearray(first.path.read_bytes())
    at = raw.index(b"archive/version", second.offset)
    header = raw.index(b"archive/data.pkl", second.offset)
    assert header < at
    raw[header + 32] ^= 1  # padding of the local header: no reader minds
    first.path.write_bytes(bytes(raw))
    assert_same(read(directory, arch), logical)
    pickled = raw.index(b"_rebuild_tensor_v2", second.offset)
    raw[pickled] ^= 1
    first.path.write_bytes(bytes(raw))
    with refuses("record data.pkl", "CRC"):
        read_torch_dist(directory, arch)
