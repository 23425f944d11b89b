"""How a rank's storage is cut into the shards that it saves of a global tensor, and which objects are beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarlhf.architectures.architecture import Architecture
from megarlhf.placement import Box, Shape
from megarlhf.weights.checkpoint.formats.torch_dist.keys import GlobalSlice, StorageName

_EXTRA_STATES = {
    "": ("decoder.final_layernorm",),
    "layer": (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "self_attention.core_attention",  # before Megatron-Core 0.16
        "self_attention.q_layernorm",
        "self_attention.k_layernorm",
        "input_layernorm",
        "pre_mlp_layernorm",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    ),
    "expert": ("linear_fc1", "linear_fc2"),
}
"""Modules for which one spec or the other asks for an `_extra_state` (of fp8; here None). Loaders fail on what they
miss and leave alone what they do not ask for, so they get all."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A box of one rank's storage that is one shard of a global tensor."""

    local: Box
    """Box in the rank's storage."""
    key: str
    tensor: Shape
    """Shape of the global tensor."""
    box: Box
    """Box in the global tensor, leading axes included."""


def shards_of(shape: Shape, whole: Shape, part: GlobalSlice, tp_rank: int, halves: int) -> Iterator[LocalShard]:
    """A rank's storage of `shape` as shards of a storage of shape `whole` without tensor parallelism."""
    axis = next((dim for dim, (a, b) in enumerate(zip(shape, whole, strict=True)) if a != b), None)
    rows, all_rows = shape[0] // halves, whole[0] // halves
    for half in range(halves):
        local = Box.whole(shape).rows(half * rows, (half + 1) * rows)
        start = [half * all_rows, *(0 for _ in shape[1:])]
        if axis is not None:
            start[axis] += tp_rank * local.shape[axis]
        offset = (*part.lead, *start)
        sizes = (*(1 for _ in part.lead), *local.shape)
        box = Box(offset, tuple(a + n for a, n in zip(offset, sizes, strict=True)))
        yield LocalShard(local, part.key, part.shape, box)


@dataclass(frozen=True, slots=True)
class ExtraState:
    """An object beside the tensors, one for each place along the leading axes of its module."""

    key: str
    index: Shape
    shape: Shape

    @property
    def unique_key(self) -> str:
        """Key in the spelling of Megatron-Core's `ShardedObject`."""
        return f"{self.key}/shard_{'.'.join(map(str, self.index))}_{'.'.join(map(str, self.shape))}"


def extra_states(arch: Architecture) -> Iterator[ExtraState]:
    """The objects that loaders of either spec ask for."""
    names = [StorageName(module) for module in _EXTRA_STATES[""]]
    for layer in range(arch.num_layers):
        names += [StorageName(module, layer) for module in _EXTRA_STATES["layer"]]
        for expert in range(arch.num_experts):
            names += [StorageName(module, layer, expert) for module in _EXTRA_STATES["expert"]]
    for name in names:
        index = name.lead("stacked") or (0,)
        shape = name.lead_shape("stacked", arch.num_layers, arch.num_experts) or (1,)
        yield ExtraState(f"{name.key('stacked')}._extra_state", index, shape)
