"""Writes Megatron-LM's older checkpoints, a file per rank, with holes where the tensors' bytes belong."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import Head
from megarlhf.placement import RankPlacements
from megarlhf.weights.checkpoint.formats.megatron.tracker import Iteration, checkpoint_directory, write_tracker
from megarlhf.weights.checkpoint.formats.mp_rank.read import MODEL_FILES, VERSION, folder_name
from megarlhf.weights.checkpoint.formats.torch_file.archive import TensorSpec, write_skeleton
from megarlhf.weights.transport.extent import Extent


def preallocate_mp_rank(
    directory: Path,
    arch: Architecture,
    layout: MegatronLayout,
    head: Head,
    dtype: torch.dtype,
    args: Mapping[str, Any],
    iteration: Iteration,
) -> tuple[list[RankPlacements], list[dict[str, Extent]]]:
    """Creates a run's root with one checkpoint whose tensors are holes: what each file holds, and where.

    `args`: `args_of`, with more if wished; they become the checkpoint's Namespace.

    Raises: ValueError when the layout does not fit the model.
    """
    parts = layout.parts(arch, head)
    folder = checkpoint_directory(directory, iteration)
    number = 0 if iteration == "release" else iteration
    stated = Namespace(**{**args, "ckpt_format": "torch", "use_dist_ckpt": False, "iteration": number})
    extents = []
    for at, part in zip(layout.ranks(), parts, strict=True):
        path = folder / folder_name(at, layout.pp, layout.ep) / MODEL_FILES[0]
        path.parent.mkdir(parents=True)
        models = _model_specs(part, layout.vpp, dtype)
        content = {"args": stated, "checkpoint_version": VERSION, "iteration": number, **models}
        written, _ = write_skeleton(path, content)
        chunks = {key: written[key] for key in models}
        if layout.vpp > 1:
            extents.append({f"{key}.{name}": extent for key, model in chunks.items() for name, extent in model.items()})
        else:
            extents.append(dict(chunks["model"]))
    write_tracker(directory, iteration)
    return parts, extents


def _model_specs(part: RankPlacements, vpp: int, dtype: torch.dtype) -> dict[str, OrderedDict[str, TensorSpec]]:
    """The state dict of each model chunk, by its key in the file."""
    specs = {name: TensorSpec(shape, dtype) for name, shape in part.storages.items()}
    if vpp == 1:
        return {"model": OrderedDict(specs)}
    keys = [f"model{v}" for v in range(vpp)]
    return {
        key: OrderedDict((n.removeprefix(key + "."), s) for n, s in specs.items() if n.startswith(key + "."))
        for key in keys
    }
