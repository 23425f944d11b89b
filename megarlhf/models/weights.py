"""A role's weights, moved by copy plans: where they stand on each rank, loading, export."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from megarlhf.architectures.architecture import hf_class, read_config
from megarlhf.architectures.placements import head_name
from megarlhf.config import ModelConfig
from megarlhf.models.build import ModelPart, placements_on
from megarlhf.models.settings import DTYPES
from megarlhf.placement import RankPlacements
from megarlhf.weights.checkpoint.export import export
from megarlhf.weights.checkpoint.stored_model import open_model, require_scalar_head
from megarlhf.weights.transport.local import carry_from_files, check_storages
from megarlhf.weights.transport.random_init import fill_random

log = logging.getLogger(__name__)

INITIALIZER_RANGE = 0.02
"""Standard deviation of random weights where config.json has no `initializer_range`; Hugging Face's default."""


def replica_placements(part: ModelPart) -> list[RankPlacements]:
    """The ranks of this rank's copy of the model, which together hold it once."""
    return [placements_on(part, rank) for rank in part.mesh.replica_ranks]


def load_weights(part: ModelPart, model: ModelConfig, *, seed: int, new_head: bool = False) -> None:
    """Fill every parameter: from a checkpoint of any format and layout, or at random, the same at every layout.

    Each rank reads just its boxes. `new_head`: a scalar role may start from a language model, with a random head.

    Raises: ValueError for a scalar role whose checkpoint has no scalar head, where neither `new_head` nor
    `model.fresh_head` allows a random one.
    """
    mine = placements_on(part, part.mesh.runtime.rank)
    live = part.parameters()
    check_storages(mine, live)
    std = float(read_config(model.described_by()).get("initializer_range", INITIALIZER_RANGE))
    if model.random_init:
        fill_random(mine, live, seed=seed, std=std, arch=part.arch, head=part.head)
        return
    stored = open_model(model.path, hf=model.hf, head=part.head)
    score = head_name(part.arch, "scalar")
    random_head = part.head == "scalar" and (model.fresh_head or stored.head != "scalar")
    if random_head and not (new_head or model.fresh_head):
        require_scalar_head(stored)
    fresh = frozenset({score} & mine.tensors.keys()) if random_head else frozenset()
    carry_from_files(mine, stored.weights, live, skip=fresh)
    if random_head:
        log.info("%s: the scalar head starts at random", model.path)
    if fresh:
        fill_random(mine, live, seed=seed, std=std, arch=part.arch, head=part.head, only=fresh)


def export_hugging_face(part: ModelPart, source: Path, directory: Path) -> None:
    """Write the live model as a Hugging Face directory; config and tokenizer come from `source`.

    Collective over the first replica's ranks, which are those with data-parallel coordinate 0; the others
    return at once.
    """
    if part.mesh.at.dp != 0:
        return
    config = read_config(source)
    config["architectures"] = [hf_class(part.arch.model_type, part.head)]
    if part.head == "scalar":
        config["num_labels"] = 1
    replica = replica_placements(part)
    export(
        replica,
        part.parameters(),
        directory,
        arch=part.arch,
        config=config,
        dtype=next(iter(part.parameters().values())).dtype,
        rank=part.mesh.runtime.rank,
        head=part.head,
        writer_rank=replica[0].rank,
        group=part.mesh.groups.mp,
        copy_from=source,
    )


def parameter_dtype(model: ModelConfig) -> torch.dtype:
    """The dtype of a role's parameters."""
    return DTYPES[model.dtype]
