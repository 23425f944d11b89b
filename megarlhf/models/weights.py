"""A role's weights, moved by copy plans: where they stand on each rank, loading, export."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from megarlhf.architectures.hf_config import hf_class, read_config
from megarlhf.architectures.placements import head_name
from megarlhf.config import ModelConfig
from megarlhf.models.build import ModelShard, placements_on
from megarlhf.models.settings import DTYPES
from megarlhf.placement import RankPlacements
from megarlhf.weights.checkpoint.export import export
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.transport.random_init import fill_random
from megarlhf.weights.transport.storages import check_storages, load_from_files

log = logging.getLogger(__name__)

INITIALIZER_RANGE = 0.02
"""Standard deviation of random weights where config.json has no `initializer_range`; Hugging Face's default."""


def replica_placements(shard: ModelShard) -> list[RankPlacements]:
    """The ranks of this rank's copy of the model, which together hold it once."""
    return [placements_on(shard, rank) for rank in shard.mesh.replica_ranks]


def load_weights(shard: ModelShard, model: ModelConfig, *, seed: int) -> None:
    """Fill every parameter: from a checkpoint of any format and layout, or at random, the same at every layout.

    Each rank reads just its boxes. A scalar role that starts from a language model gets a fresh head.
    """
    mine = placements_on(shard, shard.mesh.runtime.rank)
    live = shard.parameters()
    check_storages(mine, live)
    std = float(read_config(model.hf_directory()).get("initializer_range", INITIALIZER_RANGE))
    if model.random_init:
        fill_random(mine, live, seed=seed, std=std, arch=shard.arch, head=shard.head)
        return
    stored = open_checkpoint(model.path, hf=model.hf, head=shard.head)
    held = {tensor for source in stored.weights.parts for tensor in source.tensors}
    score = head_name(shard.arch, "scalar")
    fresh = frozenset({score} & mine.tensors.keys() - held)
    load_from_files(mine, stored.weights, live, skip=fresh)
    if shard.head == "scalar" and score not in held:
        log.info("%s has no %s: the scalar head starts fresh", model.path, score)
    if fresh:
        fill_random(mine, live, seed=seed, std=std, arch=shard.arch, head=shard.head, only=fresh)


def export_hugging_face(shard: ModelShard, source: Path, directory: Path) -> None:
    """Write the live model as a Hugging Face directory; config and tokenizer come from `source`.

    Collective over the first replica's ranks, which are those with data-parallel coordinate 0; the others
    return at once.
    """
    if shard.mesh.coordinates.dp != 0:
        return
    config = read_config(source)
    config["architectures"] = [hf_class(shard.arch.model_type, shard.head)]
    if shard.head == "scalar":
        config["num_labels"] = 1
    replica = replica_placements(shard)
    export(
        replica,
        shard.parameters(),
        directory,
        arch=shard.arch,
        config=config,
        dtype=next(iter(shard.parameters().values())).dtype,
        rank=shard.mesh.runtime.rank,
        head=shard.head,
        writer_rank=replica[0].rank,
        group=shard.mesh.groups.mp,
        copy_from=source,
    )


def parameter_dtype(model: ModelConfig) -> torch.dtype:
    """The dtype of a role's parameters."""
    return DTYPES[model.dtype]
