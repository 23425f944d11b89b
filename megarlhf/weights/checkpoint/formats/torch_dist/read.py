"""Checkpoints in `.distcp` files, `torch_dist` and others (`saved.py`), read without Megatron and a process group.

Of a checkpoint saved at any layout, in any form of keys and with either spec's norm names, the reader makes one
part: each shard that some rank saved is a storage, and the tensor map, cut along the shards, says which boxes
of the logical tensors are in it. Optimizer state, `_extra_state` and random states are passed over. Tensors'
bytes are never read. `write.py` is the other direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from os import PathLike
from pathlib import Path

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import Head
from megarlhf.placement import Box, Placement, RankPlacements, Shape, contiguous_strides
from megarlhf.weights.checkpoint.formats.megatron.args import MegatronWeights, described_arch, layout_of
from megarlhf.weights.checkpoint.formats.torch_dist.keys import (
    GlobalSlice,
    KeyForm,
    StorageName,
    cut,
    global_slices,
    is_gated,
    key_form,
    shard_name,
)
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import (
    GlobalTensor,
    SavedShard,
    read_extents,
    require_apart,
)
from megarlhf.weights.checkpoint.formats.torch_dist.saved import EMBEDDING, SavedModel, read_saved

OUTPUT = "output_layer.weight"


def read_torch_dist(directory: str | PathLike[str], arch: Architecture | None = None) -> MegatronWeights:
    """Opens one iteration's directory, headers only: one part, whose storages are the shards of the model's tensors.

    `arch` defaults to what args say, and so does the layout of the run that saved it. A model without a scalar head
    whose last layer is `output_layer.weight` [1, hidden] is taken for one with it.

    Raises: ValueError that lists every missing, extra or wrongly shaped tensor; or says that a file is missing,
    truncated, damaged, or names a class that is not on the allow-list.
    """
    return place_saved(read_saved(Path(directory)), arch)


def place_saved(saved: SavedModel, arch: Architecture | None) -> MegatronWeights:
    """The places of the model's tensors in what `read_saved` opened. Arguments and errors: `read_torch_dist`."""
    tensors = saved.tensors
    arch = arch or described_arch(saved.args)
    require_apart(saved.directory, tensors.values())
    padded_vocab = tensors[EMBEDDING].shape[0]
    head: Head = "scalar" if OUTPUT in tensors and tensors[OUTPUT].shape[0] == 1 else "lm"
    (whole,) = MegatronLayout(padded_vocab=padded_vocab, spec="te").parts(arch, head)
    slices = _slices_by_storage(saved, whole, key_form(tensors), arch)
    part, shards = _cut_along_shards(whole, slices, tensors)
    extents = read_extents({name: (shard, tensors[key].dtype) for name, (key, shard) in shards.items()})
    return MegatronWeights(
        saved.directory,
        (part,),
        (extents,),
        args=saved.args.values,
        foreign=saved.args.foreign(),
        arch=arch,
        head=head,
        layout=layout_of(saved.args.values, padded_vocab),
    )


def _slices_by_storage(
    saved: SavedModel, whole: RankPlacements, form: KeyForm, arch: Architecture
) -> dict[str, list[GlobalSlice]]:
    """Places of each storage of the whole model.

    Raises: ValueError that lists all that differs.
    """
    tensors = saved.tensors
    slices_of: dict[str, list[GlobalSlice]] = {}
    used: set[str] = set()
    missing: dict[str, None] = {}
    misshapen: dict[str, str] = {}
    for storage, shape in whole.storages.items():
        candidates = _candidates(storage, shape, form, arch)
        slices = next((c for c in candidates if all(part.key in tensors for part in c)), None)
        if slices is None:
            missing |= {part.key: None for part in candidates[0] if part.key not in tensors}
            continue
        slices_of[storage] = slices
        for part in slices:
            used.add(part.key)
            if tensors[part.key].shape != part.shape:
                misshapen[part.key] = f"{part.key} has shape {tensors[part.key].shape}, expected {part.shape}"
    problems = [f"{key} is missing" for key in missing] + list(misshapen.values())
    problems += [f"{key} is not part of the model" for key in tensors if key not in used]
    if problems:
        raise ValueError(
            f"{saved.directory} ({saved.format}) differs from the model's config.json in {len(problems)} tensors: "
            f"{'; '.join(problems)}. Check that config.json and the checkpoint belong together"
        )
    return slices_of


def _candidates(storage: str, shape: Shape, form: KeyForm, arch: Architecture) -> list[list[GlobalSlice]]:
    """Places that a storage may have: under either name of a norm; a gated fc1 in halves or whole (torch_dcp)."""
    name, gated = StorageName.parse(storage), is_gated(storage, arch.gated_mlp)
    other = name.other_norm()
    return [
        global_slices(candidate, shape, form, num_layers=arch.num_layers, num_experts=arch.num_experts, gated=in_halves)
        for candidate in ([name] if other is None else [name, other])
        for in_halves in ([True, False] if gated else [False])
    ]


def _cut_along_shards(
    whole: RankPlacements, slices_of: Mapping[str, list[GlobalSlice]], tensors: Mapping[str, GlobalTensor]
) -> tuple[RankPlacements, dict[str, tuple[str, SavedShard]]]:
    """The placements of the whole model cut along the shards; and each shard, with its key, by its storage's name."""
    by_storage = whole.by_storage()
    indices: dict[str, dict[Shape, list[SavedShard]]] = {}
    shards: dict[str, tuple[str, SavedShard]] = {}
    placements: list[Placement] = []
    for storage, slices in slices_of.items():
        shape = whole.storages[storage]
        for part in slices:
            if part.key not in indices:
                indices[part.key] = _by_lead(tensors[part.key], len(part.lead))
            for shard in indices[part.key].get(part.lead, ()):
                name = shard_name(part.key, shard.box.start)
                shards[name] = (part.key, shard)
                placements += _placements_in_shard(by_storage[storage], shape, part, shard.box, name)
    storages = {name: shard.box.shape for name, (_, shard) in shards.items()}
    return RankPlacements(0, storages, tuple(placements), whole.tensors), shards


def _placements_in_shard(
    placements: list[Placement], shape: Shape, part: GlobalSlice, box: Box, name: str
) -> Iterator[Placement]:
    """Placements inside one shard, `box` of the slice's tensor."""
    num_lead = len(part.lead)
    strides = contiguous_strides(box.shape)
    offset = sum((i - a) * s for i, a, s in zip(part.lead, box.start, strides, strict=False))
    shift = (part.start, *(0 for _ in shape[1:]))
    local_box = Box(box.start[num_lead:], box.stop[num_lead:]).shift(shift)
    for placement in placements:
        in_shard = cut(placement, shape, local_box, storage=name, offset=offset, strides=strides[num_lead:])
        if in_shard is not None:
            yield in_shard


def _by_lead(tensor: GlobalTensor, num_lead: int) -> dict[Shape, list[SavedShard]]:
    """A tensor's shards by each index along its first `num_lead` dims that they hold."""
    index: dict[Shape, list[SavedShard]] = {}
    for shard in tensor.shards:
        for lead in product(*map(range, shard.box.start[:num_lead], shard.box.stop[:num_lead])):
            index.setdefault(lead, []).append(shard)
    return index
