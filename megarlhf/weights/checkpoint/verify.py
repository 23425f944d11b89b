"""Whether two stored models, of any formats and layouts, hold the same numbers; and where they first differ."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from megarlhf.architectures.placements import identity_placements, logical_tensors
from megarlhf.placement import Box, Placement, Shape, contiguous_strides, flat_boxes
from megarlhf.weights.checkpoint.open_checkpoint import StoredModel
from megarlhf.weights.checks.digest import BITS, digest_boxes, whole_digest
from megarlhf.weights.checks.replicas import require_equal_replicas
from megarlhf.weights.plan.copy_plan import Copy, make_plan
from megarlhf.weights.transport.extent import MappedFiles

_PIECE = 1 << 20


@dataclass(frozen=True)
class Digests:
    """A model's logical tensors by name."""

    tensors: Mapping[str, int]
    """64-bit digests, the same in every format and layout."""

    def whole(self) -> str:
        """One number for the model, as 16 hex digits."""
        return whole_digest(self.tensors)


class Opened:
    """A stored model's logical tensors: every element once, wherever it stands."""

    def __init__(self, model: StoredModel) -> None:
        self.model = model
        self.tensors = logical_tensors(model.arch, model.head)
        self._maps = MappedFiles()
        plan = make_plan(model.weights.parts, [identity_placements(self.tensors, len(model.weights.parts))])
        self._copies: dict[str, list[Copy]] = defaultdict(list)
        for copy in plan.copies:
            self._copies[copy.tensor].append(copy)

    def digest(self, tensor: str, dtype: torch.dtype | None = None) -> int:
        """Of the bits in `dtype`, default: as stored."""
        total = 0
        for copy in self._copies[tensor]:
            key, storage = self._source(copy)
            placement = Placement(tensor, copy.box, key, copy.src_offset, copy.src_strides)
            found = digest_boxes([placement], {key: storage}, dtype or storage.dtype)
            total = (total + found[tensor]) % 2**64
        return total

    def dtype(self, tensor: str) -> torch.dtype:
        copy = self._copies[tensor][0]
        return self.model.weights.extents[copy.src_rank][copy.src_storage].dtype

    def pieces(self, tensor: str) -> Iterator[tuple[Box, torch.Tensor]]:
        """The tensor in row-major pieces of at most a million elements."""
        shape = self.tensors[tensor]
        size = torch.Size(shape).numel()
        for start in range(0, size, _PIECE):
            for box in flat_boxes(shape, start, min(start + _PIECE, size)):
                yield box, self._read(tensor, box)

    def _read(self, tensor: str, box: Box) -> torch.Tensor:
        values = torch.empty(box.shape, dtype=self.dtype(tensor))
        for copy in self._copies[tensor]:
            hit = copy.box.intersect(box)
            if hit is not None:
                _, storage = self._source(copy)
                part = copy.source.part(hit)
                at = tuple(slice(a - o, b - o) for a, b, o in zip(hit.start, hit.stop, box.start, strict=True))
                offset = storage.storage_offset() + part.offset
                values[at] = torch.as_strided(storage, hit.shape, part.strides, offset)
        return values

    def _source(self, copy: Copy) -> tuple[str, torch.Tensor]:
        extent = self.model.weights.extents[copy.src_rank][copy.src_storage]
        return copy.src_storage, self._maps.tensor(extent)


def digests(
    model: StoredModel, *, dtype: torch.dtype | None = None, progress: Callable[[str], None] = lambda tensor: None
) -> Digests:
    """The digests of all logical tensors, on all cores.

    Raises: ValueError when ranks of the checkpoint hold different values of the same box.
    """
    require_equal_replicas(model.weights)
    opened = Opened(model)

    def one(tensor: str) -> int:
        found = opened.digest(tensor, dtype)
        progress(tensor)
        return found

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return Digests(dict(zip(opened.tensors, pool.map(one, opened.tensors), strict=True)))


def differences(a: StoredModel, b: StoredModel, found_a: Digests, found_b: Digests, dtype: torch.dtype | None) -> str:
    """What differs, in a few lines: tensors that one side lacks, shapes, and the first differing element of the
    first tensor whose digests differ. Empty when the models are the same."""
    first, second = Opened(a), Opened(b)
    lines = [
        f"{name} is only in {here.model.directory}"
        for here, there in ((first, second), (second, first))
        for name in here.tensors
        if name not in there.tensors
    ]
    both = [name for name in first.tensors if name in second.tensors]
    shapes = [name for name in both if first.tensors[name] != second.tensors[name]]
    lines += [f"{name} has shape {first.tensors[name]} and {second.tensors[name]}" for name in shapes]
    other = [name for name in both if name not in shapes and found_a.tensors[name] != found_b.tensors[name]]
    if other:
        lines.append(f"{len(other)} of {len(both)} tensors differ; the first: {_first(first, second, other[0], dtype)}")
    return "\n".join(lines)


def _first(a: Opened, b: Opened, tensor: str, dtype: torch.dtype | None) -> str:
    if dtype is None and a.dtype(tensor) != b.dtype(tensor):
        return f"{tensor} is {a.dtype(tensor)} and {b.dtype(tensor)}; --dtype compares after a cast"
    for (box, left), (_, right) in zip(a.pieces(tensor), b.pieces(tensor), strict=True):
        cast = dtype or left.dtype
        left, right = left.to(cast), right.to(cast)
        wrong = _bits(left) != _bits(right)
        if bool(wrong.any()):
            flat = int(wrong.reshape(-1).to(torch.uint8).argmax())
            index = _index(box, flat)
            values = left.reshape(-1)[flat].item(), right.reshape(-1)[flat].item()
            return f"{tensor}[{', '.join(map(str, index))}] is {values[0]!r} and {values[1]!r}"
    raise AssertionError(f"{tensor}: digests differ, elements do not")


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(BITS[values.element_size()])


def _index(box: Box, flat: int) -> Shape:
    index = []
    for start, step in zip(box.start, contiguous_strides(box.shape), strict=True):
        along, flat = divmod(flat, step)
        index.append(start + along)
    return tuple(index)
