"""What megarlhf's own reader and writer of torch.save files bring over torch's, one figure a line.

    python -m benchmarks.torch_files [--tensors 960] [--chunks 291000]

Writes: a file whose tensors are holes. Reads: where each tensor stands, without its bytes. Metadata: the pickle of a
torch_dist checkpoint with so many chunks. Damage: of single flipped bits in a file's headers, how many move a tensor
unnoticed. Everything is in a temporary directory; the holes take no disk.
"""

from __future__ import annotations

import argparse
import io
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megarlhf.placement import Box
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import _ALLOWED, _INERT, Blob, GlobalTensor, SavedShard
from megarlhf.weights.checkpoint.formats.torch_dist.metadata_pickle import pickle_metadata
from megarlhf.weights.checkpoint.formats.torch_file.archive import TensorSpec, read_torch_file, write_skeleton
from megarlhf.weights.checkpoint.formats.torch_file.unpickle import unpickle


def timed(name: str, action: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 -- what torch cannot do is a result
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return None
    print(f"{name}: {time.perf_counter() - start:.2f} s")
    return result


def save_by_torch(path: Path, count: int) -> None:
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        model = {f"layer.{i}.weight": torch.empty(8192, 8192, dtype=torch.bfloat16) for i in range(count)}
        torch.save({"args": Namespace(a=1), "model": model}, path)


def offsets_by_torch(path: Path) -> dict[str, int]:
    with FakeTensorMode(), torch.serialization.safe_globals([Namespace]):
        model = torch.load(path, weights_only=True)["model"]
    return {name: tensor.untyped_storage()._checkpoint_offset for name, tensor in model.items()}


def metadata(count: int) -> bytes:
    rows = 97
    shards = tuple(
        SavedShard(Box((i, 0), (i + 1, 64)), Blob(Path("__0_0.distcp"), 8192 * i, 8000)) for i in range(count // rows)
    )
    tensor = GlobalTensor((len(shards), 64), torch.bfloat16, shards)
    return pickle_metadata({f"decoder.layers.{i}.weight": tensor for i in range(rows)}, {})


def damage(path: Path, flips: int) -> None:
    """Flips in what stands ahead of each tensor and in the directory, not in tensors."""
    torch.save({"args": Namespace(a=1), "model": {f"{i}": torch.full((3, i + 1), float(i)) for i in range(20)}}, path)
    raw, sound, draw = path.read_bytes(), offsets_by_torch(path), random.Random(0)
    values = torch.load(path, weights_only=False)["model"]
    unnoticed = {"torch.load": 0, "megarlhf": 0}
    for _ in range(flips):
        changed = bytearray(raw)
        changed[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            loaded = offsets_by_torch(path)
            unnoticed["torch.load"] += loaded != sound
        except Exception:  # noqa: BLE001 -- noticed
            pass
        try:
            model = read_torch_file(path)["model"]
            unnoticed["megarlhf"] += {name: extent.offset for name, extent in model.items()} != sound
        except ValueError:
            pass
    print(f"damage: of {flips} flipped bits in {len(values)} tensors' file, tensors were moved unnoticed: {unnoticed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=960)
    parser.add_argument("--chunks", type=int, default=291_000)
    arguments = parser.parse_args()
    specs = {f"layer.{i}.weight": TensorSpec((8192, 8192), torch.bfloat16) for i in range(arguments.tensors)}
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours.pt", Path(folder) / "theirs.pt"
        timed("write, megarlhf", lambda: write_skeleton(ours, {"args": Namespace(a=1), "model": specs}))
        timed("write, torch", lambda: save_by_torch(theirs, arguments.tensors))
        timed("read, megarlhf", lambda: read_torch_file(ours))
        timed("read, torch", lambda: offsets_by_torch(ours))
        raw = timed("metadata, write", lambda: metadata(arguments.chunks))
        timed("metadata, read", lambda: unpickle(raw, allowed=_ALLOWED, inert=_INERT))
        timed("metadata, torch's weights_only", lambda: torch._weights_only_unpickler.load(io.BytesIO(raw)))
        code = "import time, torch; t = time.perf_counter(); import torch.distributed.checkpoint.metadata; "
        code += "print('import of torch.distributed.checkpoint:', round(time.perf_counter() - t, 2), 's')"
        subprocess.run([sys.executable, "-c", code], check=True)
        damage(Path(folder) / "damaged.pt", 1000)


if __name__ == "__main__":
    main()
