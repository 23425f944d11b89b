"""CRC-32 of the tensors in files of torch.save: written on demand, compared by `inspect --check`.

torch.save writes them and torch.load does not look at them; safetensors has none.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarlhf.weights.checkpoint.formats.huggingface.read import HFFiles, is_huggingface
from megarlhf.weights.checkpoint.formats.megatron.tracker import find_checkpoint
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import Blob, read_tensors
from megarlhf.weights.checkpoint.formats.torch_dist.saved import is_distcp
from megarlhf.weights.checkpoint.formats.torch_file.archive import check_crc, seal


def write_checksums(directory: Path, *, workers: int | None = None) -> int:
    """States the CRC-32 of every tensor that has none; returns how many files of torch.save there are."""
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return len(
            list(pool.map(lambda blob: seal(blob.path, offset=blob.offset, length=blob.length), _blobs(directory)))
        )


def check_checksums(directory: Path) -> tuple[int, int]:
    """Compares every stored byte, optimizer state's too, with its CRC-32.

    Returns: how many files of torch.save there are (a torch_dist checkpoint has one a tensor and rank), and how many
    of them do not state every CRC. Raises: ValueError at one that differs.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        unstated = list(
            pool.map(lambda blob: bool(check_crc(blob.path, offset=blob.offset, length=blob.length)), _blobs(directory))
        )
    return len(unstated), sum(unstated)


def has_checksums(directory: Path) -> bool:
    """Whether the format has a place for them: not safetensors."""
    return bool(_blobs(directory))


def _blobs(directory: Path) -> list[Blob]:
    if is_huggingface(directory):
        used = {extent.path for extent in HFFiles(directory).tensors.values() if extent.path.suffix == ".bin"}
        return [Blob(path, 0, path.stat().st_size) for path in sorted(used)]
    folder, _ = find_checkpoint(directory)
    assert folder is not None, f"{directory} was recognised as a Megatron checkpoint"
    if is_distcp(folder):
        return list({shard.blob: None for tensor in read_tensors(folder).values() for shard in tensor.shards})
    return [Blob(path, 0, path.stat().st_size) for path in sorted(folder.glob("mp_rank_*/*.pt"))]
