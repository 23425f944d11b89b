"""Places of the whole Megatron model's storages in a `torch_dist` checkpoint: keys, leading axes, halves.

A checkpoint holds global tensors, those of one rank without any parallelism, under the names of the
transformer-engine spec (Megatron's own local spec maps its norms to them). `KeyForm` says which axes precede:

- stacked: `decoder.layers.mlp.linear_fc2.weight` [layers, ...], `...mlp.experts.experts.linear_fc1.weight`
  [layers, experts, ...]; Megatron-Core's default (homogeneous layers).
- per_layer: `decoder.layers.7.mlp.linear_fc2.weight`, experts still [experts, ...] (`non_homogeneous_layers`).
- single: the same, with experts apart as `...mlp.experts.experts.3.linear_fc1.weight`, and the halves of a gated
  fc1 as `weight_w` and `weight_v` (`singleton_local_shards`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megarlhf.placement import Box, Placement, Shape, contiguous_strides, unravel

KeyForm = Literal["stacked", "per_layer", "single"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")
"""TransformerEngine's grouped layers number the weights themselves."""
_SINGLE = re.compile(r"decoder\.layers\.\d+\..*(\.experts\.\d+\.|_[wv]$)")
_GATED = re.compile(
    r"decoder\.layers\.\d+\.mlp\.((experts\.local_experts\.\d+\.)?linear_fc1\.(weight|bias)"
    r"|experts\.linear_fc1\.(weight|bias)\d+)"
)
_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
"""A norm's name when it is fused into the next linear layer, and when it is not."""


@dataclass(frozen=True, slots=True)
class StorageName:
    """A storage of a layer, of an expert of a layer, or of neither."""

    tail: str
    layer: int | None = None
    expert: int | None = None

    @classmethod
    def parse(cls, name: str) -> StorageName:
        """Parse the name of a parameter; layer and expert stay as the name counts them."""
        if (of_layer := _LAYER.fullmatch(name)) is None:
            return cls(name)
        layer, tail = int(of_layer[1]), of_layer[2]
        if (of_expert := _EXPERT.fullmatch(tail)) is not None:
            return cls(of_expert[2], layer, int(of_expert[1]))
        if (grouped := _GROUPED_EXPERT.fullmatch(tail)) is not None:
            return cls(grouped[1], layer, int(grouped[2]))
        return cls(tail, layer)

    def globally(self, layers: Sequence[int], first_expert: int) -> StorageName:
        """The global form of a name that counts the layers of one stage (`layers`) and the experts of one rank."""
        return StorageName(
            self.tail,
            None if self.layer is None else layers[self.layer],
            None if self.expert is None else first_expert + self.expert,
        )

    def key(self, form: KeyForm) -> str:
        if self.layer is None:
            return self.tail
        layer = "" if form == "stacked" else f"{self.layer}."
        expert = ""
        if self.expert is not None:
            expert = "mlp.experts.experts." + (f"{self.expert}." if form == "single" else "")
        return f"decoder.layers.{layer}{expert}{self.tail}"

    def lead(self, form: KeyForm) -> tuple[int, ...]:
        """Index along the leading axes of the global tensor: layer, expert."""
        layer = (self.layer,) if self.layer is not None and form == "stacked" else ()
        return layer + ((self.expert,) if self.expert is not None and form != "single" else ())

    def lead_shape(self, form: KeyForm, num_layers: int, num_experts: int) -> Shape:
        layer = (num_layers,) if self.layer is not None and form == "stacked" else ()
        return layer + ((num_experts,) if self.expert is not None and form != "single" else ())

    def other_norm(self) -> StorageName | None:
        """The same norm under its other name: fused for unfused and the other way round."""
        for pair in _NORMS:
            for a, b in (pair, pair[::-1]):
                if self.layer is not None and self.expert is None and self.tail.startswith(a):
                    return StorageName(b + self.tail.removeprefix(a), self.layer)
        return None


@dataclass(frozen=True, slots=True)
class GlobalSlice:
    """Place of a storage's rows from `start` on (all of it: 0) in a global tensor."""

    key: str
    lead: tuple[int, ...]
    shape: Shape
    """Shape of the global tensor, leading axes included."""
    start: int


def global_slices(
    name: StorageName, shape: Shape, form: KeyForm, *, num_layers: int, num_experts: int, gated: bool
) -> list[GlobalSlice]:
    """Places of a storage of the whole model; two for a gated fc1 in the single form."""
    key, lead = name.key(form), name.lead(form)
    before = name.lead_shape(form, num_layers, num_experts)
    if form != "single" or not gated:
        return [GlobalSlice(key, lead, (*before, *shape), 0)]
    half = shape[0] // 2
    tensor = (*before, half, *shape[1:])
    return [GlobalSlice(f"{key}_w", lead, tensor, 0), GlobalSlice(f"{key}_v", lead, tensor, half)]


def is_gated(storage: str, gated_mlp: bool) -> bool:
    """Whether the storage is a gated fc1, [gate; up], whose halves Megatron saves apart."""
    return gated_mlp and _GATED.fullmatch(storage) is not None


def key_form(keys: Iterable[str]) -> KeyForm:
    """The form of a checkpoint, by the keys of its tensors. Without experts or gates, single is per_layer."""
    form: KeyForm = "stacked"
    for key in keys:
        if _SINGLE.match(key):
            return "single"
        if _LAYER.fullmatch(key):
            form = "per_layer"
    return form


def shard_name(key: str, offset: Shape) -> str:
    """The name of the storage that is the shard of a global tensor at `offset`."""
    return f"{key}[{','.join(map(str, offset))}]"


def cut(placement: Placement, shape: Shape, box: Box, *, storage: str, offset: int, strides: Shape) -> Placement | None:
    """The part of a placement inside `box` of its storage (of `shape`), as a placement in another storage.

    There the box starts at `offset` and runs along `strides`, one per dim of `shape`. None: they do not overlap.
    """
    at, dims = _where(placement, shape)
    extent = [1] * len(shape)
    for dim, size in zip(dims, placement.box.shape, strict=True):
        if dim is not None:
            extent[dim] = size
    common = Box(at, tuple(a + n for a, n in zip(at, extent, strict=True))).intersect(box)
    if common is None:
        return None
    start, stop, steps = list(placement.box.start), list(placement.box.stop), []
    for k, dim in enumerate(dims):
        steps.append(1 if dim is None else strides[dim])
        if dim is not None:
            first = placement.box.start[k] - at[dim]
            start[k], stop[k] = first + common.start[dim], first + common.stop[dim]
    ahead = sum((a - b) * s for a, b, s in zip(common.start, box.start, strides, strict=True))
    return Placement(placement.tensor, Box(tuple(start), tuple(stop)), storage, offset + ahead, tuple(steps))


def _where(placement: Placement, shape: Shape) -> tuple[Shape, list[int | None]]:
    """Where a placement starts in its storage, and the storage's dim of each dim (None for those of size 1)."""
    steps = contiguous_strides(shape)
    # Dims of size 1 share their stride with a neighbour; nothing can run along them.
    dim_of = {step: dim for dim, (step, size) in enumerate(zip(steps, shape, strict=True)) if size > 1}
    dims: list[int | None] = []
    for size, step in zip(placement.box.shape, placement.strides, strict=True):
        assert size == 1 or step in dim_of, f"{placement} runs across the dims of {shape}"
        dims.append(dim_of[step] if size > 1 else None)
    return unravel(placement.offset, shape), dims
