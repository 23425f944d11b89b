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
        models: dict[str, OrderedDict[str, TensorSpec]] = {}  # the state dict of each model chunk, by its key
        key_and_name = {
            storage: tuple(storage.split(".", 1)) if layout.vpp > 1 else ("model", storage) for storage in part.storages
        }
        for storage, (key, name) in key_and_name.items():
            models.setdefault(key, OrderedDict())[name] = TensorSpec(part.storages[storage], dtype)
        content = {"args": stated, "checkpoint_version": VERSION, "iteration": number, **models}
        written, _ = write_skeleton(path, content)
        extents.append({storage: written[key][name] for storage, (key, name) in key_and_name.items()})
    write_tracker(directory, iteration)
    return parts, extents
