"""A role as Megatron-Core's sharded tensors: parameters, and of a trained one their fp32 copies and the optimizer's
moments.

Each rank describes the boxes that it holds of global tensors, under the keys of Megatron-Core's own checkpoints
(`weights/checkpoint/formats/torch_dist/keys.py`); optimizer state stands under `optimizer.state.NAME.KEY`. A part of a
distributed optimizer is a flat range of a parameter, which is a few boxes. So nothing is gathered to be saved, and a
state saved at one layout is loaded at any other.

Megatron-Core's keys are of all layers together, which those of the optimizer cannot be where some layers are frozen: a
checkpoint whose global tensors have holes is none. There each layer's (and each expert's) has a key of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.safe_globals import register_safe_globals
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from megarlhf.architectures.adapters import LIVE
from megarlhf.architectures.megatron_layout import ModelRank
from megarlhf.models.build import ModelShard, placements_on
from megarlhf.models.role import Role
from megarlhf.parallel.chunks import split_name
from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.parallel.optimizer_pieces import counts_per_parameter, optimizers_in
from megarlhf.parallel.step import Trainer
from megarlhf.placement import Box, Shape, flat_boxes
from megarlhf.weights.checkpoint.formats.megatron.args import args_of
from megarlhf.weights.checkpoint.formats.torch_dist.keys import StorageName, global_slices, is_gated, shard_name
from megarlhf.weights.checkpoint.formats.torch_dist.shards import LocalShard, extra_states, shards_of
from megarlhf.weights.checkpoint.formats.torch_dist.write import common_state

EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
EXPERTS = ".experts."
_BY_LAYER = re.compile(r"optimizer\.state\..*\.layers\..*\[[\d,]+\]")
"""`optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight[7]`"""
_UNFUSED_NORMS = ("input_layernorm.", "pre_mlp_layernorm.")

ShardedState = dict[str, ShardedTensor | ShardedObject]


@dataclass(frozen=True)
class _OptimizerPart:
    """The elements [start, stop) of a parameter, row-major, and the optimizer's flat tensors over them."""

    start: int
    stop: int
    tensors: Mapping[str, Tensor]
    owned: bool
    """No other data-parallel rank has them."""


def sharded_state(role: Role, *, optimizer: bool = True, by_layer: bool | None = None) -> ShardedState:
    """This rank's part of a role's saved state: views of live tensors, or of host memory where tensors are offloaded.

    The keys of the dict have no meaning. With an adapter, only the adapter and the scalar head are saved: nothing else
    changes, and a resumed run loads the base again. Empty on ranks that the role does not use.

    optimizer: include the optimizer state of a trained role
    by_layer:  each layer's optimizer state has a key of its own; None: as new points are written
    """
    if not role.mesh.is_member:
        return {}
    trainer = role.trainer if optimizer else None
    if trainer is not None:
        trainer.make_optimizer_state()
    readable = role.parts.to_read()
    parts = {} if trainer is None else _optimizer_parts(trainer, readable)
    shard, at, experts = role.shard, role.mesh.coordinates, role.mesh.experts
    whole = _whole_shapes(shard)
    state: ShardedState = {}
    if by_layer is None:
        by_layer = _trains_some(role)

    def add(key: str, shard_of: LocalShard, view: Tensor, replica: tuple[int, int, int]) -> None:
        lead = len(shard_of.tensor) - view.ndim
        view = view.detach().view((1,) * lead + tuple(view.shape))
        state[str(len(state))] = ShardedTensor(
            key=key,
            data=view,
            dtype=view.dtype,
            local_shape=tuple(view.shape),
            global_shape=shard_of.tensor,
            global_offset=shard_of.box.start,
            axis_fragmentations=None,
            replica_id=replica,
            # The vocabulary is padded to a multiple of tp.
            allow_shape_mismatch=shard_of.key in (EMBEDDING, _OUTPUT),
        )

    for name, parameter in shard.module.named_parameters():
        if not _is_saved(shard, name):
            continue
        values, tied = readable(parameter.detach()), int(is_tied_copy(shard, name))
        duplicate = at.tp if tuple(parameter.shape) == whole[name] else 0
        of_expert = EXPERTS in name
        copy = experts.dp if of_expert else at.cp + at.dp * role.mesh.layout.cp
        for piece in _pieces(shard, name, tuple(parameter.shape), whole[name]):
            rows = values[piece.local.start[0] : piece.local.stop[0]]
            add(piece.key, piece, rows, (tied, duplicate, copy))
            part = parts.get(parameter)
            if part is not None:
                replica = (tied, duplicate, 0 if part.owned else copy)
                own = _by_itself(piece, parameter.ndim) if by_layer else piece
                for key, box, view in _optimizer_boxes(own, part, tuple(parameter.shape)):
                    add(key, box, view, replica)
    if role.mesh.runtime.rank == role.mesh.layout.first and shard.arch.adapter is None:
        for extra in extra_states(shard.arch):
            state[extra.unique_key] = ShardedObject(extra.key, None, extra.shape, extra.index)
    return state


def bytes_to_write(state: ShardedState) -> int:
    """Bytes that this rank writes."""
    mine = [
        item.data for item in state.values() if isinstance(item, ShardedTensor) and is_main_replica(item.replica_id)
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in mine if tensor is not None)


def load_state(role: Role, directory: Path) -> None:
    """Fill a role that has just been built, parameters and optimizer, from a folder of any layout. Collective."""
    by_layer = _trains_some(role) and role.mesh.is_member and _is_by_layer(directory)
    state = sharded_state(role, by_layer=by_layer)
    tensors = {name: item for name, item in state.items() if isinstance(item, ShardedTensor)}
    register_safe_globals()  # a caller's `torch.serialization.safe_globals` has perhaps ended their registration
    with megatron_device(role.mesh.runtime.device):
        dist_checkpointing.load(tensors, str(directory), validate_access_integrity=False)


def common(role: Role, iteration: int) -> dict[str, Any]:
    """Content of `common.pt`: Megatron-LM's arguments of the model."""
    shard = role.shard
    return common_state(args_of(shard.arch.base, shard.megatron_layout, shard.dtype), iteration)


def counters(role: Role) -> dict[str, Any]:
    """Steps of optimizer and learning-rate schedule; empty for a role that is not trained."""
    if role.trainer is None:
        return {}
    return {
        "optimizer_steps": _optimizer_steps(role.trainer.optimizer),
        "scheduler_steps": int(role.trainer.scheduler.num_steps),
    }


def set_counters(role: Role, values: Mapping[str, Any]) -> None:
    """Set what `counters` returned, on a role that has just been built."""
    if role.trainer is None:
        return
    _set_optimizer_steps(role.trainer.optimizer, values["optimizer_steps"])
    role.trainer.scheduler.num_steps = 0
    role.trainer.scheduler.step(increment=values["scheduler_steps"])


def _trains_some(role: Role) -> bool:
    """Tell whether some layers may have no optimizer state, by the configuration; the same on every rank."""
    return role.shard.arch.adapter is None and bool(role.section.freeze or role.section.train_only)


def _is_by_layer(directory: Path) -> bool:
    """Tell whether optimizer state is by layer there. Earlier versions wrote all layers together, on one rank."""
    return any(_BY_LAYER.fullmatch(key) for key in FileSystemReader(directory).read_metadata().state_dict_metadata)


def _by_itself(piece: LocalShard, dims: int) -> LocalShard:
    """The piece in a global tensor of its layer, or of its expert, alone."""
    lead = len(piece.tensor) - dims
    if not lead:
        return piece
    box = Box(piece.box.start[lead:], piece.box.stop[lead:])
    return replace(piece, key=shard_name(piece.key, piece.box.start[:lead]), tensor=piece.tensor[lead:], box=box)


def _is_saved(shard: ModelShard, name: str) -> bool:
    """Tell whether a parameter is saved."""
    if shard.arch.adapter is None or LIVE in name:
        return True
    return shard.head == "scalar" and split_name(name)[1] == _OUTPUT


def _pieces(shard: ModelShard, name: str, shape: Shape, whole: Shape) -> list[LocalShard]:
    """Boxes of a live parameter in the checkpoint's global tensors."""
    if LIVE in name:
        return list(_pieces_of_adapter(shard, name, shape))
    arch, mesh = shard.arch, shard.mesh
    chunk, inside = split_name(name)
    layers = layers_of(shard)[chunk]
    storage = StorageName.parse(EMBEDDING if is_tied_copy(shard, name) else inside)
    if shard.spec == "local" and storage.tail.startswith(_UNFUSED_NORMS):
        storage = storage.other_norm() or storage
    gated = is_gated(inside, arch.gated_mlp)
    (part,) = global_slices(
        storage.globally(layers, mesh.experts.cp * arch.num_experts // mesh.layout.ep),
        whole,
        "stacked",
        num_layers=arch.num_layers,
        num_experts=arch.num_experts,
        gated=gated,
    )
    return list(shards_of(shape, whole, part, mesh.coordinates.tp, 2 if gated else 1))


def _pieces_of_adapter(shard: ModelShard, name: str, shape: Shape) -> Iterator[LocalShard]:
    """An adapter's logical tensors are global tensors by themselves, since not every layer need have them. Each box of
    one stands in whole rows of the parameter."""
    here = placements_on(shard, shard.mesh.runtime.rank)
    for placement in here.by_storage()[name]:
        first = placement.offset // shape[1]
        local = Box.whole(shape).rows(first, first + placement.box.shape[0])
        assert local.shape == placement.box.shape, f"{placement.tensor} does not fill rows of {name}"
        yield LocalShard(local, placement.tensor, here.tensors[placement.tensor], placement.box)


def _optimizer_boxes(piece: LocalShard, part: _OptimizerPart, shape: Shape) -> Iterator[tuple[str, LocalShard, Tensor]]:
    """Yield key, box in the global tensor, and view for each box of the optimizer's tensors in a piece of a
    parameter."""
    row = math.prod(shape[1:])
    first, last = piece.local.start[0] * row, piece.local.stop[0] * row
    lead = len(piece.tensor) - len(shape)
    into = (*piece.box.start[:lead], *(g - a for g, a in zip(piece.box.start[lead:], piece.local.start, strict=True)))
    at = max(part.start, first)
    for box in flat_boxes(shape, at, min(part.stop, last)):
        placed = replace(box, start=(0,) * lead + box.start, stop=(1,) * lead + box.stop).shift(into)
        for name, tensor in part.tensors.items():
            view = tensor.detach().view(-1)[at - part.start : at - part.start + box.numel].view(box.shape)
            yield f"optimizer.state.{name}.{piece.key}", replace(piece, local=box, box=placed), view
        at += box.numel


def _optimizer_parts(trainer: Trainer, readable: Callable[[Tensor], Tensor]) -> dict[nn.Parameter, _OptimizerPart]:
    """Optimizer state of this rank, by parameter. `readable` gives a tensor's present memory, on device or host."""
    parts: dict[nn.Parameter, _OptimizerPart] = {}
    for inner in optimizers_in(trainer.optimizer):
        for parameter in trainer.module.parameters():
            if isinstance(inner, DistributedOptimizer):
                try:
                    owned = inner._get_model_param_range_map(parameter)["param"]
                except KeyError:
                    continue  # other data-parallel ranks have it
                tensors = dict(inner._get_main_param_and_optimizer_states(parameter))
                main = tensors.pop("param")
                start, stop = owned.start, owned.end
            else:
                main = getattr(parameter, "main_param", parameter)
                if main not in inner.optimizer.state:
                    continue
                tensors = dict(inner.optimizer.state[main])
                start, stop = 0, parameter.numel()
            tensors.pop("step", None)
            if parameter.dtype != torch.float32:  # otherwise the parameter is its own main parameter
                tensors["fp32_param"] = main
            here = {name: readable(tensor.detach()) for name, tensor in tensors.items()}
            parts[parameter] = _OptimizerPart(start, stop, here, isinstance(inner, DistributedOptimizer))
    return parts


def _optimizer_steps(optimizer: MegatronOptimizer) -> int:
    counts: set[int] = set()
    for inner in optimizers_in(optimizer):
        if counts_per_parameter(inner.optimizer):
            counts |= {int(state["step"]) for state in inner.optimizer.state.values() if "step" in state}
        else:
            counts |= {int(group["step"]) for group in inner.optimizer.param_groups if "step" in group}
    assert len(counts) <= 1, f"parameters have made different numbers of steps: {sorted(counts)}"
    return counts.pop() if counts else 0


def _set_optimizer_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    for inner in optimizers_in(optimizer):
        if counts_per_parameter(inner.optimizer):
            for state in inner.optimizer.state.values():
                state["step"].fill_(float(steps))
        elif steps:
            for group in inner.optimizer.param_groups:
                group["step"] = steps


def is_tied_copy(shard: ModelShard, name: str) -> bool:
    """Tell whether the parameter is the last stage's copy of the embedding."""
    return split_name(name)[1] == _OUTPUT and shard.head == "lm" and shard.arch.tied_embeddings


def layers_of(shard: ModelShard) -> list[range]:
    """The layers of each of this rank's chunks, by their numbers in the whole model."""
    return shard.megatron_layout.chunk_layers(shard.arch.num_layers)[shard.mesh.coordinates.pp]


def _whole_shapes(shard: ModelShard) -> Mapping[str, Shape]:
    """Shapes of this rank's parameters as they would be without tensor parallelism."""
    undivided = replace(shard.megatron_layout, tp=1)
    at = ModelRank(pp=shard.mesh.coordinates.pp, ep=shard.mesh.experts.cp, tp=0)
    return undivided.part(shard.arch, shard.head, at).storages
