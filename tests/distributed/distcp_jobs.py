"""Checkpoints of Megatron's formats and of other programs, saved by Megatron-Core and torch.distributed.checkpoint.

Each rank of a pool runs `save_as`. The parameters are those of a Hugging Face directory, put under the names of
Megatron's modules by plain slicing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.placement import Shape
from megarlhf.runtime import Runtime
from megarlhf.weights.checkpoint.formats.megatron.args import OWN_KEY, args_of
from tests.weights.cases import fill_from_logical

Tensors = dict[str, torch.Tensor]


def module_state(hf: Path, layout: MegatronLayout) -> tuple[Architecture, Tensors]:
    """The model's architecture, and its parameters under the names of Megatron's modules, on one rank."""
    arch = architecture_from_hf(hf)
    logical = {name: value for file in hf.glob("*.safetensors") for name, value in load_file(file).items()}
    (part,) = layout.parts(arch)
    dtype = next(iter(logical.values())).dtype
    state = {name: torch.zeros(shape, dtype=dtype) for name, shape in part.storages.items()}
    fill_from_logical(part, state, logical)
    return arch, state


def plain_args(arch: Architecture, layout: MegatronLayout, **changes: Any) -> argparse.Namespace:
    """Megatron-LM's arguments, without the key that only we write."""
    named = args_of(arch, layout, torch.bfloat16)
    del named[OWN_KEY]
    return argparse.Namespace(**{**named, **changes})


def save_as(joined: Runtime, kind: str, hf: str, root: str, experts: str = "each") -> None:
    """Save the model of a Hugging Face directory below `root`."""
    from megarlhf.parallel.megatron_cpu import megatron_device

    layout = MegatronLayout(padded_vocab=256, spec="te", experts=experts)  # type: ignore[arg-type]
    arch, state = module_state(Path(hf), layout)
    if joined.rank == 0:
        shutil.rmtree(root, ignore_errors=True)
        Path(root).mkdir()
    dist.barrier()
    with megatron_device(joined.device):
        _SAVERS[kind](joined, arch, layout, state, Path(root))
    dist.barrier()


# --- Megatron-Core's torch_dist ---------------------------------------------------------------------


def _common_state(joined: Runtime, arch: Architecture, layout: MegatronLayout, state: Tensors, root: Path) -> None:
    """As Megatron-Core 0.19 saves: megatron/core/dist_checkpointing/serialization.py, save (the lines with
    `sharded_state_dict["common_state"] = ShardedObject(...)`); and megatron/training/checkpointing.py,
    generate_state_dict, which puts `args`, `iteration` and `checkpoint_version` into the common state."""
    from megatron.core.dist_checkpointing import ShardedObject

    common = {"args": plain_args(arch, layout), "checkpoint_version": 3.0, "iteration": 10}
    folder = _megatron_root(joined, root)
    sharded = _stacked(state, arch)
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=joined.rank)
    _save_torch_dist(sharded, folder)
    if joined.rank == 0:
        (folder / "common.pt").unlink()  # the installed Megatron-Core still writes one


def _foreign(joined: Runtime, arch: Architecture, layout: MegatronLayout, state: Tensors, root: Path) -> None:
    """As ms-swift saved, whose arguments held an object of swift.megatron.model.gpt_bridge."""
    module = sys.modules["mytrainer.bridge"] = types.ModuleType("mytrainer.bridge")
    sys.modules["mytrainer"] = types.ModuleType("mytrainer")

    class Bridge:
        pass

    Bridge.__module__, Bridge.__qualname__, module.Bridge = "mytrainer.bridge", "Bridge", Bridge  # type: ignore[attr-defined]
    args = plain_args(arch, layout, bridge=[Bridge()])
    _save_torch_dist({**_stacked(state, arch), "args": args}, _megatron_root(joined, root))


def _swift_rope(joined: Runtime, arch: Architecture, layout: MegatronLayout, state: Tensors, root: Path) -> None:
    """As ms-swift states rotary scaling: its swift/megatron/argument/megatron_args.py, MegatronArguments (v3.12:
    `rope_scaling`, a dict after __post_init__, and `partial_rotary_factor`); use_rope_scaling stays False."""
    from megarlhf.architectures.rope import write_scaling

    stated = write_scaling(arch.rope_scaling)["rope_scaling"]
    args = plain_args(arch, layout, use_rope_scaling=False, rope_scaling=stated, partial_rotary_factor=None)
    _save_torch_dist({**_stacked(state, arch), "args": args}, _megatron_root(joined, root))


def _nemo(joined: Runtime, arch: Architecture, layout: MegatronLayout, state: Tensors, root: Path) -> None:
    """As NeMo 2 saves: nemo/lightning/ckpt_utils.py (WEIGHTS_PATH, CONTEXT_PATH), and the prefix `module.` of
    nemo/lightning/megatron_parallel.py, _module_sharded_state_dict. No args."""
    if joined.rank == 0:
        (root / "weights").mkdir()
        (root / "context" / "nemo_tokenizer").mkdir(parents=True)
        (root / "context" / "nemo_tokenizer" / "tokenizer.json").write_text('{"of": "NeMo"}')
    dist.barrier()
    _save_torch_dist(_stacked(state, arch, "module."), root / "weights")


def _verl(joined: Runtime, arch: Architecture, layout: MegatronLayout, state: Tensors, root: Path) -> None:
    """As verl saves: docs/advance/checkpoint.rst and verl/utils/checkpoint/megatron_checkpoint_manager.py
    (global_step_N/actor/model/dist_ckpt). No args."""
    folder = root / "global_step_10" / "actor" / "model" / "dist_ckpt"
    if joined.rank == 0:
        folder.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text("10")
    dist.barrier()
    _save_torch_dist(_stacked(state, arch), folder)


def _megatron_root(joined: Runtime, root: Path) -> Path:
    folder = root / "iter_0000010"
    if joined.rank == 0:
        folder.mkdir()
        (root / "latest_checkpointed_iteration.txt").write_text("10")
    dist.barrier()
    return folder


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


def _stacked(state: Tensors, arch: Architecture, prefix: str = "") -> dict[str, Any]:
    """Megatron-Core's sharded tensors of one rank, under the keys of its homogeneous layers."""
    from megatron.core.dist_checkpointing import ShardedTensor

    sharded: dict[str, Any] = {}
    for name, value in state.items():
        key, offsets = name, []
        if (of_layer := _LAYER.fullmatch(name)) is not None:
            key, offsets = f"decoder.layers.{of_layer[2]}", [(0, int(of_layer[1]), arch.num_layers)]
            if (of_expert := _EXPERT.fullmatch(of_layer[2])) is not None:
                key = f"decoder.layers.mlp.experts.experts.{of_expert[2]}"
                offsets.append((1, int(of_expert[1]), arch.num_experts))
        sharded[prefix + name] = ShardedTensor.from_rank_offsets(
            prefix + key, value, *offsets, prepend_axis_num=len(offsets), replica_id=dist.get_rank()
        )
    return sharded


def _save_torch_dist(sharded: dict[str, Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(sharded, str(folder))


# --- torch.distributed.checkpoint -------------------------------------------------------------------


def _torch_dcp(joined: Runtime, arch: Architecture, layout: MegatronLayout, state: Tensors, root: Path) -> None:
    """As Megatron-LM saves with torch's FSDP2: megatron/training/checkpointing.py, generate_state_dict (branch `torch,
    torch_dcp, fsdp_dtensor`) and save_checkpoint (branch `ckpt_format in ['torch_dcp', 'fsdp_dtensor']`)."""
    mesh = DeviceMesh("cpu", torch.arange(joined.world_size))
    model: dict[str, Any] = {}
    for name, value in state.items():
        rows = [len(part) for part in value.chunk(joined.world_size)]
        model[name] = _rows_of(value, (rows + [0] * joined.world_size)[: joined.world_size], joined, mesh)
        if name.endswith("linear_qkv.weight"):  # Transformer Engine's state without fp8
            model[name.replace("weight", "_extra_state")] = torch.empty(0, dtype=torch.uint8)
    optimizer = {"state": {"x": torch.ones(3)}}
    args = plain_args(arch, layout, ckpt_format="torch_dcp")
    whole = {"model": model, "args": args, "iteration": 10, "checkpoint_version": 3.0, "optimizer": optimizer}
    folder = _megatron_root(joined, root)
    dcp.save(whole, storage_writer=dcp.FileSystemWriter(folder))


def _fsdp_dtensor(joined: Runtime, arch: Architecture, layout: MegatronLayout, state: Tensors, root: Path) -> None:
    """As Megatron-FSDP saves: uneven DTensors of its `module.` wrapper, whose halves of a gated fc1 are apart and whose
    experts are numbered globally. megatron/training/checkpointing.py, preprocess_fsdp_dtensor_state_dict;
    megatron/core/transformer/fsdp_dtensor_checkpoint.py, handle_swiglu_in_state_dict, handle_experts_in_state_dict;
    megatron/core/distributed/fsdp/src/megatron_fsdp/uneven_dtensor.py, preprocess_state_dict_for_uneven_dtensor."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    mesh = DeviceMesh("cpu", torch.arange(joined.world_size))
    model: dict[str, Any] = {}
    for name, value in state.items():
        halves = [("", value)]
        if re.search(r"\.linear_fc1\.weight\d*$", name):
            gate, up = value.chunk(2)
            halves = [("_w", gate), ("_v", up)]
        for suffix, half in halves:
            first = 0 if half.dim() == 1 else half.shape[0] // 3  # no row of a norm is on the first rank
            rows = [first] * (joined.world_size - 1)
            model[f"module.{name}{suffix}"] = _rows_of(half, [*rows, half.shape[0] - sum(rows)], joined, mesh)
    whole = {"model": model, "args": plain_args(arch, layout, ckpt_format="fsdp_dtensor"), "iteration": 10}
    preprocess_state_dict_for_uneven_dtensor(whole)
    folder = _megatron_root(joined, root)
    dcp.save(whole, storage_writer=dcp.FileSystemWriter(folder))


def _rows_of(value: torch.Tensor, rows: list[int], joined: Runtime, mesh: DeviceMesh) -> DTensor:
    """A DTensor of which each rank has so many rows."""
    start = sum(rows[: joined.rank])
    local = value[start : start + rows[joined.rank]].clone()
    shape: Shape = tuple(value.shape)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=value.stride())


_SAVERS = {
    "common_state": _common_state,
    "foreign": _foreign,
    "swift_rope": _swift_rope,
    "nemo": _nemo,
    "verl": _verl,
    "torch_dcp": _torch_dcp,
    "fsdp_dtensor": _fsdp_dtensor,
}
