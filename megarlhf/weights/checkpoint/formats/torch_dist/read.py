"""Megatron-Core's `torch_dist` distributed checkpoints, read without Megatron and without a process group.

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

from megarlhf.architectures.adapters import is_adapter_tensor
from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import Head
from megarlhf.placement import Box, Placement, RankPlacements, Shape, contiguous_strides
from megarlhf.weights.checkpoint.formats.megatron.args import MegatronWeights, arch_of, layout_of
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
    check_config,
    read_args,
    read_extents,
    read_tensors,
    require_apart,
)

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_OPTIMIZER = ("optimizer.", "chained_")


def read_torch_dist(directory: str | PathLike[str], arch: Architecture | None = None) -> MegatronWeights:
    """Opens one iteration's directory, headers only: one part, whose storages are the shards of the model's tensors.

    `arch` defaults to what args say, and so does the layout of the run that saved it. A model without a scalar head
    whose last layer is `output_layer.weight` [1, hidden] is taken for one with it.

    Raises: ValueError that lists every missing, extra or wrongly shaped tensor; or says that a file is missing,
    truncated, damaged, or names a class that is not on the allow-list.
    """
    directory = Path(directory)
    check_config(directory)
    args = read_args(directory)
    arch = arch or arch_of(args)
    tensors = {key: tensor for key, tensor in read_tensors(directory).items() if not key.startswith(_OPTIMIZER)}
    require_apart(directory, tensors.values())
    if EMBEDDING not in tensors:
        raise ValueError(
            f"{directory} has no {EMBEDDING} among its {len(tensors)} tensors; "
            + (
                "it is the resume point of an adapter, without the model that the adapter is on: give what the run has "
                "exported (checkpoints/latest)"
                if any(is_adapter_tensor(name) for name in tensors)
                else "give the checkpoint of a GPTModel"
            )
        )
    padded_vocab = tensors[EMBEDDING].shape[0]
    head: Head = "scalar" if OUTPUT in tensors and tensors[OUTPUT].shape[0] == 1 else "lm"
    (whole,) = MegatronLayout(padded_vocab=padded_vocab, spec="te").parts(arch, head)
    slices = _slices_by_storage(directory, whole, tensors, key_form(tensors), arch)
    part, shards = _cut_along_shards(whole, slices, tensors)
    extents = read_extents({name: (shard, tensors[key].dtype) for name, (key, shard) in shards.items()})
    return MegatronWeights(
        directory, (part,), (extents,), args=args, arch=arch, head=head, layout=layout_of(args, padded_vocab)
    )


def _slices_by_storage(
    directory: Path, whole: RankPlacements, tensors: Mapping[str, GlobalTensor], form: KeyForm, arch: Architecture
) -> dict[str, list[GlobalSlice]]:
    """Places of each storage of the whole model.

    Raises: ValueError that lists all that differs.
    """
    slices_of: dict[str, list[GlobalSlice]] = {}
    used: set[str] = set()
    missing: dict[str, None] = {}
    misshapen: dict[str, str] = {}
    for storage, shape in whole.storages.items():
        name = StorageName.parse(storage)
        other = name.other_norm()
        candidates = [
            global_slices(
                candidate,
                shape,
                form,
                num_layers=arch.num_layers,
                num_experts=arch.num_experts,
                gated=is_gated(storage, arch.gated_mlp),
            )
            for candidate in ([name] if other is None else [name, other])
        ]
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
            f"{directory} differs from the model's config.json in {len(problems)} tensors: {'; '.join(problems)}. "
            "Check that config.json and the checkpoint belong together"
        )
    return slices_of


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
