"""Whether two stored models, of any formats and layouts, hold the same numbers; and where they first differ."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from megarlhf.architectures.placements import identity_placements, logical_tensors
from megarlhf.placement import Box, unravel
from megarlhf.weights.checkpoint.open_checkpoint import Checkpoint
from megarlhf.weights.checks.digest import digest_boxes, first_difference
from megarlhf.weights.checks.replicas import require_equal_replicas
from megarlhf.weights.plan.copy_plan import Copy, make_plan
from megarlhf.weights.transport.extent import MappedFiles

_BLOCK_ELEMENTS = 1 << 20


class TensorReader:
    """A stored model's logical tensors: every element once, wherever it is stored."""

    def __init__(self, model: Checkpoint) -> None:
        self.model = model
        self.tensors = logical_tensors(model.arch, model.head)
        self._extents, self._maps = model.weights.extents, MappedFiles()
        plan = make_plan(model.weights.parts, [identity_placements(self.tensors, len(model.weights.parts))])
        self._copies: dict[str, list[Copy]] = defaultdict(list)
        for copy in plan.copies:
            self._copies[copy.tensor].append(copy)

    def digest(self, tensor: str, dtype: torch.dtype | None = None) -> int:
        """Digest of the tensor's bits in `dtype`, default: as stored."""
        total = 0
        for copy in self._copies[tensor]:
            storage = self._maps.tensor(self._extents[copy.src_rank][copy.src.storage])
            by_tensor = digest_boxes([copy.src], {copy.src.storage: storage}, dtype or storage.dtype)
            total = (total + by_tensor[tensor]) % 2**64
        return total

    def dtype(self, tensor: str) -> torch.dtype:
        copy = self._copies[tensor][0]
        return self._extents[copy.src_rank][copy.src.storage].dtype

    def blocks(self, tensor: str) -> Iterator[tuple[Box, torch.Tensor]]:
        """The tensor in row-major boxes of at most a million elements."""
        for box in Box.whole(self.tensors[tensor]).blocks(_BLOCK_ELEMENTS):
            yield box, self._read(tensor, box)

    def _read(self, tensor: str, box: Box) -> torch.Tensor:
        values = torch.empty(box.shape, dtype=self.dtype(tensor))
        for copy in self._copies[tensor]:
            common = copy.box.intersect(box)
            if common is not None:
                index = tuple(slice(a - o, b - o) for a, b, o in zip(common.start, common.stop, box.start, strict=True))
                values[index] = self._maps.view(copy.src.part(common), self._extents[copy.src_rank])
        return values


def digests(
    model: Checkpoint, *, dtype: torch.dtype | None = None, progress: Callable[[str], None] = lambda tensor: None
) -> dict[str, int]:
    """The 64-bit digests of all logical tensors by name, on all cores: the same in every format and layout.

    Raises: ValueError when ranks of the checkpoint hold different values of the same box.
    """
    require_equal_replicas(model.weights)
    reader = TensorReader(model)

    def digest(tensor: str) -> int:
        number = reader.digest(tensor, dtype)
        progress(tensor)
        return number

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(reader.tensors, pool.map(digest, reader.tensors), strict=True))


def differences(
    a: Checkpoint, b: Checkpoint, digests_a: Mapping[str, int], digests_b: Mapping[str, int], dtype: torch.dtype | None
) -> str:
    """A description of the difference in a few lines: tensors that one side lacks, shapes, and the first differing
    element of the first tensor whose digests differ. Empty when the models are the same."""
    first, second = TensorReader(a), TensorReader(b)
    lines = [
        f"{name} is only in {here.model.directory}"
        for here, there in ((first, second), (second, first))
        for name in here.tensors
        if name not in there.tensors
    ]
    both = [name for name in first.tensors if name in second.tensors]
    shapes = [name for name in both if first.tensors[name] != second.tensors[name]]
    lines += [f"{name} has shape {first.tensors[name]} and {second.tensors[name]}" for name in shapes]
    different = [name for name in both if name not in shapes and digests_a[name] != digests_b[name]]
    if different:
        example = _first(first, second, different[0], dtype)
        lines.append(f"{len(different)} of {len(both)} tensors differ; the first: {example}")
    return "\n".join(lines)


def _first(a: TensorReader, b: TensorReader, tensor: str, dtype: torch.dtype | None) -> str:
    if dtype is None and a.dtype(tensor) != b.dtype(tensor):
        return f"{tensor} is {a.dtype(tensor)} and {b.dtype(tensor)}; --dtype compares after a cast"
    for (box, left), (_, right) in zip(a.blocks(tensor), b.blocks(tensor), strict=True):
        cast = dtype or left.dtype
        if difference := first_difference(left.to(cast), right.to(cast)):
            element, *values = difference
            index = [start + at for start, at in zip(box.start, unravel(element, box.shape), strict=True)]
            return f"{tensor}{index} is {values[0]!r} and {values[1]!r}"
    raise AssertionError(f"{tensor}: digests differ, elements do not")
