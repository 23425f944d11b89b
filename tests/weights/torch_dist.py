"""`torch_dist` checkpoints filled with tensors of our choice, and read again."""

import numpy as np
import torch

from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import hf_placements
from megarlhf.weights.checkpoint.formats.megatron.tracker import checkpoint_directory
from megarlhf.weights.checkpoint.formats.torch_dist.read import read_torch_dist
from megarlhf.weights.checkpoint.formats.torch_dist.write import preallocate_torch_dist
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.extent import MappedFiles
from megarlhf.weights.transport.storages import view
from tests.weights.cases import random_logical, tiny

VOCAB = 104


def write(root, arch, layout, logical, *, head="lm", dtype=torch.float32):
    """A checkpoint filled through its extents; the directory of the iteration."""
    root.mkdir(exist_ok=True)
    parts, extents = preallocate_torch_dist(root, arch, layout, head, dtype, {"lr": 0.5}, 12)
    source = hf_placements(arch, head).on_rank(len(parts))
    for copy in make_plan([source], parts).copies:
        extent = extents[copy.dst_rank][copy.dst.storage]
        assert extent.offset % 64 == 0
        raw = np.memmap(extent.path, np.uint8, "r+", extent.offset, (extent.num_bytes,))
        values = view(copy.src, {copy.src.storage: logical[copy.tensor]})
        view(copy.dst, {copy.dst.storage: torch.from_numpy(raw).view(dtype)}).copy_(values)
        raw.flush()
    return checkpoint_directory(root, 12)


def read(directory, arch):
    checkpoint = read_torch_dist(directory, arch)
    wanted = hf_placements(arch, checkpoint.head).on_rank(1)
    maps = MappedFiles()
    got = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in wanted.storages.items()}
    for copy in make_plan(checkpoint.parts, [wanted]).copies:
        stored = {copy.src.storage: maps.tensor(checkpoint.extents[0][copy.src.storage])}
        view(copy.dst, got).copy_(view(copy.src, stored))
    return got


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(got[name], values), name


def tiny_checkpoint(root):
    arch = tiny()
    logical = random_logical(arch)
    return arch, logical, write(root, arch, MegatronLayout(tp=2, padded_vocab=VOCAB), logical)
