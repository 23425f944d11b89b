"""Files of torch.save without torch.load: structure and extents, damage, skeletons. Not covered: big-endian machines
(only their mark), torch versions other than the installed one."""

from __future__ import annotations

import io
import pathlib
import pickle
import random
import signal
import zipfile
from argparse import Namespace
from collections import OrderedDict, defaultdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megarlhf.weights.checkpoint.formats.torch_file.archive import (
    TensorSpec,
    check_crc,
    read_torch_file,
    seal,
    write_skeleton,
)
from megarlhf.weights.transport.extent import Extent, MappedFiles
from tests.refuses import refuses


def same(read: Any, saved: Any) -> int:
    """Compares a structure of extents with the object saved; returns how many tensors it compared."""
    if isinstance(saved, torch.Tensor):
        assert isinstance(read, Extent)
        assert read.shape == tuple(saved.shape)
        assert read.dtype == saved.dtype
        assert torch.equal(MappedFiles().tensor(read), saved.detach())
        return 1
    if isinstance(saved, dict):
        assert list(read) == list(saved)
        return sum(same(read[key], value) for key, value in saved.items())
    if isinstance(saved, (list, tuple)):
        assert type(read) is type(saved)
        return sum(same(a, b) for a, b in zip(read, saved, strict=True))
    assert read == saved
    return 0


def tensors() -> OrderedDict[str, Any]:
    base = torch.arange(60, dtype=torch.float32).view(5, 12)
    buffer = torch.arange(1000, dtype=torch.bfloat16)
    named = OrderedDict(
        whole=base, tied=base, transposed=base.t(), rows=base[1:3], columns=base[:, 4:7],
        parameter=torch.nn.Parameter(torch.randn(3, 4)), in_buffer=buffer[100:130].view(5, 6),
        also_in_buffer=buffer[130:131], expanded=torch.ones(3, 1).expand(3, 4), empty=torch.empty(0, 7),
        scalar=torch.tensor(1.5, dtype=torch.float64), mask=torch.tensor([True, False]), half=torch.randn(3).half(),
        bytes=torch.arange(9, dtype=torch.uint8), wide=torch.tensor([1 << 40]),
        unsigned=torch.tensor([1, 65535], dtype=torch.uint16),
    )  # fmt: skip
    named.update({f"layer.{i}": torch.full((2, i + 1), float(i)) for i in range(4)})
    named._metadata = OrderedDict(version=1)
    return named


def test_every_kind_of_view_is_read_at_its_place(tmp_path):
    saved = {"model": tensors(), "list": [torch.ones(2), (torch.zeros(1), "text")], "n": 3}
    marked = torch.nn.Parameter(torch.randn(2, 2))
    marked.tensor_model_parallel = True
    saved["marked"] = marked
    path = tmp_path / "a file.pt"
    torch.save(saved, path)
    read = read_torch_file(path)
    assert same(read, saved) == 20 + 3
    model = read["model"]
    assert model["tied"] == model["whole"]
    assert model["whole"].strides is None
    assert model["transposed"] == Extent(path, model["whole"].offset, (12, 5), torch.float32, (1, 12))
    assert model["rows"] == Extent(path, model["whole"].offset + 48, (2, 12), torch.float32)
    assert model["columns"] == Extent(path, model["whole"].offset + 16, (5, 3), torch.float32, (12, 1))
    assert model["also_in_buffer"].offset == model["in_buffer"].offset + 60
    assert model["whole"].offset % 64 == 0


def test_several_archives_in_one_file(tmp_path):
    """As torch_dist keeps them; absolute offsets, also when the archives are not aligned."""
    path, where = tmp_path / "x.distcp", []
    parts = [torch.randn(7, 3), {"a": torch.arange(5), "b": tensors()}, torch.randn(2).bfloat16()]
    with path.open("wb") as file:
        file.write(b"leading")
        for part in parts:
            start = file.tell()
            blob = io.BytesIO()
            torch.save(part, blob)
            file.write(blob.getvalue())
            where.append((start, file.tell() - start))
    for part, (start, length) in zip(parts, where, strict=True):
        assert same(read_torch_file(path, offset=start, length=length), part) >= 1
        assert check_crc(path, offset=start, length=length) == []
    with refuses("x.distcp", "truncated or damaged"):
        read_torch_file(path, offset=where[0][0], length=where[0][1] - 1)
    with refuses("x.distcp", "expected"):
        read_torch_file(path, offset=where[-1][0], length=where[-1][1] + 1)


def test_what_megatron_pickles_beside_tensors(tmp_path):
    generator = np.random.RandomState(3)
    saved = {
        "args": Namespace(a=1, dtype=torch.bfloat16, path=pathlib.PosixPath("/x/y"), timeout=timedelta(minutes=3)),
        "rng": [{"np": generator.get_state(), "py": random.Random(1).getstate(), "torch": torch.get_rng_state()}],
        "loss": np.float32(2.5), "count": np.int64(-7), "flag": np.bool_(True), "size": torch.Size([2, 3]),
        "device": torch.device("cpu"), "signal": signal.SIGTERM, "sets": {frozenset({1}), 2.5}, "raw": b"\x00\xff",
        "groups": defaultdict(list, a=[1]), "function": torch.nn.functional.gelu,
    }  # fmt: skip
    path = tmp_path / "x.pt"
    torch.save(saved, path)
    read = read_torch_file(path)
    assert isinstance(read["args"], SimpleNamespace)
    assert vars(read["args"]) == {
        "a": 1, "dtype": torch.bfloat16, "path": pathlib.PurePosixPath("/x/y"), "timeout": timedelta(minutes=3),
    }  # fmt: skip
    assert (read["loss"], read["count"], read["flag"]) == (2.5, -7, True)
    assert (read["size"], read["device"], read["raw"]) == ((2, 3), torch.device("cpu"), b"\x00\xff")
    assert (read["sets"], read["groups"]) == ({frozenset({1}), 2.5}, {"a": [1]})
    assert repr(read["signal"]) == "signal.SIGTERM" or read["signal"].args == (15,)
    assert str(read["function"]).startswith("torch._C")
    assert read["rng"][0]["py"] == random.Random(1).getstate()
    assert read["rng"][0]["torch"].shape == (torch.get_rng_state().numel(),)
    name, keys, *rest = read["rng"][0]["np"]
    assert (name, rest) == ("MT19937", list(generator.get_state()[2:]))
    assert keys.state[-1] == generator.get_state()[1].tobytes()


def test_formats_that_are_not_read(tmp_path):
    old, other, big = tmp_path / "old.pt", tmp_path / "other.pt", tmp_path / "big.pt"
    torch.save({"w": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    with refuses("old.pt", "a pickle", "torch.save"):
        read_torch_file(old)
    other.write_bytes(b"not a checkpoint" * 10)
    with refuses("other.pt", "b'not '"):
        read_torch_file(other)
    with refuses("gone.pt", "cannot be read"):
        read_torch_file(tmp_path / "gone.pt")
    with zipfile.ZipFile(big, "w") as archive:
        archive.writestr("big/data.pkl", pickle.dumps({}))
        archive.writestr("big/byteorder", "big")
    with refuses("big.pt", "byte order 'big'", "'little'"):
        read_torch_file(big)
    with zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"a": "b" * 1000}))
    with refuses("other.pt", "compressed"):
        read_torch_file(other)


def test_damage_is_found_or_harmless(tmp_path):
    """20 truncations are refused; of 400 flipped bytes each is refused or leaves the structure as it was."""
    path, broken = tmp_path / "x.pt", tmp_path / "broken.pt"
    torch.save({"model": tensors(), "args": Namespace(a=1, b=[1, 2])}, path)
    raw = path.read_bytes()
    sound = read_torch_file(path)
    for end in range(0, len(raw), len(raw) // 20):
        broken.write_bytes(raw[:end])
        with refuses("broken.pt"):
            read_torch_file(broken)
    refused = kept = unsound = 0
    draw = random.Random(0)
    for _ in range(400):
        changed = bytearray(raw)
        changed[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        broken.write_bytes(changed)
        try:
            read = read_torch_file(broken)
        except ValueError as error:
            refused += "broken.pt" in str(error)
            continue
        kept += 1
        for name, extent in read["model"].items():
            was = sound["model"][name]
            assert (extent.offset, extent.shape, extent.strides) == (was.offset, was.shape, was.strides)
        assert vars(read["args"]) == {"a": 1, "b": [1, 2]}
        try:
            check_crc(broken)
        except ValueError:
            unsound += 1
    assert refused + kept == 400
    assert refused > 50
    assert unsound > 5


def test_a_flipped_byte_of_a_tensor_is_found_by_crc(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(3), "b": torch.ones(3)}, path)
    assert check_crc(path) == []
    raw = bytearray(path.read_bytes())
    raw[read_torch_file(path)["b"].offset] ^= 1
    path.write_bytes(raw)
    with refuses("x.pt", "1 damaged records", "CRC-32", "x/data/1"):
        check_crc(path)


def specs_of(obj: Any) -> Any:
    if isinstance(obj, torch.Tensor):
        return TensorSpec(tuple(obj.shape), obj.dtype)
    if isinstance(obj, dict):
        return type(obj)((key, specs_of(value)) for key, value in obj.items())
    if isinstance(obj, (list, tuple)):
        return type(obj)(specs_of(value) for value in obj)
    return obj


def fill(extents: Any, obj: Any) -> None:
    if isinstance(obj, torch.Tensor):
        if obj.numel():
            raw = obj.detach().contiguous().view(-1).view(torch.uint8).numpy()
            np.memmap(extents.path, np.uint8, "r+", extents.offset, (raw.size,))[:] = raw
    elif isinstance(obj, (dict, list, tuple)):
        for key in obj if isinstance(obj, dict) else range(len(obj)):
            fill(extents[key], obj[key])


def test_a_filled_skeleton_is_what_torch_loads(tmp_path):
    saved = {"args": Namespace(x=1, dtype=torch.bfloat16), "model": tensors(), "list": [torch.randn(3), (5,)]}
    path = tmp_path / "model_optim_rng.pt"
    extents, end = write_skeleton(path, specs_of(saved))
    assert end == path.stat().st_size
    fill(extents, saved)
    assert len(check_crc(path)) == 20  # of 21 tensors one is empty
    for sealed in (False, True):
        if sealed:
            seal(path)
            assert check_crc(path) == []
            assert zipfile.ZipFile(path).testzip() is None
        for mmap in (False, True):
            with torch.serialization.safe_globals([Namespace]):
                loaded = torch.load(path, weights_only=True, mmap=mmap)
            assert loaded["args"] == saved["args"]
            assert [t.dtype for t in loaded["model"].values()] == [t.dtype for t in saved["model"].values()]
            assert all(torch.equal(loaded["model"][name], t) for name, t in saved["model"].items())
            assert torch.equal(loaded["list"][0], saved["list"][0])
        assert same(read_torch_file(path)["model"], saved["model"]) == 20
    assert all(extent.offset % 64 == 0 for extent in extents["model"].values())
    names = {name.removeprefix("model_optim_rng/") for name in zipfile.ZipFile(path).namelist()}
    torch.save({}, tmp_path / "model.pt")
    assert {name.removeprefix("model/") for name in zipfile.ZipFile(tmp_path / "model.pt").namelist()} <= names


def test_skeletons_one_after_another_in_a_file(tmp_path):
    path, end = tmp_path / "x.distcp", 0
    parts, where = [torch.randn(3, 5), torch.arange(7)], []
    for part in parts:
        start = end
        extent, end = write_skeleton(path, specs_of(part), offset=start)
        fill(extent, part)
        where.append((start, end - start))
    raw = path.read_bytes()
    for part, (start, length) in zip(parts, where, strict=True):
        assert torch.equal(torch.load(io.BytesIO(raw[start : start + length]), weights_only=True), part)
        seal(path, offset=start, length=length)
        assert check_crc(path, offset=start, length=length) == []


def test_a_skeleton_above_four_gigabytes_takes_no_disk(tmp_path):
    """zip64 sizes (the first) and offsets (the others), read by torch and by us."""
    path = tmp_path / "big.pt"
    specs = {"big": TensorSpec((5 << 30,), torch.uint8), "after": TensorSpec((4,), torch.float32)}
    extents, _ = write_skeleton(path, specs)
    assert path.stat().st_size > 5 << 30
    assert path.stat().st_blocks * 512 < 1 << 20
    fill(extents["after"], torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert read_torch_file(path) == extents
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["after"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert loaded["big"].shape == (5 << 30,)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("big/data/0").file_size == 5 << 30


def test_a_spec_that_stands_twice_is_one_storage_and_tensors_are_refused(tmp_path):
    spec = TensorSpec((2,), torch.float32)
    extents, _ = write_skeleton(tmp_path / "x.pt", {"a": spec, "b": spec, "c": TensorSpec((2,), torch.float32)})
    assert extents["a"] == extents["b"]
    assert extents["c"].offset != extents["a"].offset
    with refuses("shape (3,)"):
        write_skeleton(tmp_path / "y.pt", [torch.ones(3)])
