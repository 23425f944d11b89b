"""A role's weights, moved by copy plans: where they stand on each rank, loading, export."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from megarlhf.architectures.architecture import hf_class, read_config
from megarlhf.architectures.placements import Head, head_name
from megarlhf.config import ModelConfig
from megarlhf.models.build import ModelPart, placements_on
from megarlhf.models.settings import DTYPES
from megarlhf.placement import RankPlacements
from megarlhf.together import FailingTogether
from megarlhf.weights.checkpoint.dtype import ResolvedDtype, resolve_dtype
from megarlhf.weights.checkpoint.export import export
from megarlhf.weights.checkpoint.stored_model import open_model
from megarlhf.weights.transport.local import carry_from_files, check_storages
from megarlhf.weights.transport.random_init import fill_random

log = logging.getLogger(__name__)

INITIALIZER_RANGE = 0.02
"""Standard deviation of random weights where config.json has no `initializer_range`; Hugging Face's default."""


def replica_placements(part: ModelPart) -> list[RankPlacements]:
    """The ranks of this rank's copy of the model, which together hold it once."""
    return [placements_on(part, rank) for rank in part.mesh.replica_ranks]


def load_weights(part: ModelPart, model: ModelConfig, *, seed: int) -> None:
    """Fill every parameter: from a checkpoint of any format and layout, or at random, the same at every layout.

    Each rank reads just its boxes. A scalar role that starts from a language model gets a fresh head.
    """
    mine = placements_on(part, part.mesh.runtime.rank)
    live = part.parameters()
    check_storages(mine, live)
    std = float(read_config(model.described_by()).get("initializer_range", INITIALIZER_RANGE))
    if model.random_init:
        fill_random(mine, live, seed=seed, std=std, arch=part.arch, head=part.head)
        return
    stored = open_model(model.path, hf=model.hf, head=part.head)
    held = {tensor for source in stored.weights.parts for tensor in source.tensors}
    score = head_name(part.arch, "scalar")
    fresh = frozenset({score} & mine.tensors.keys() - held)
    carry_from_files(mine, stored.weights, live, skip=fresh)
    if part.head == "scalar" and score not in held:
        log.info("%s has no %s: the scalar head starts fresh", model.path, score)
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


def parameter_dtype(role: str, model: ModelConfig, head: Head) -> torch.dtype:
    """The dtype of a role's parameters: one for all ranks, found by rank 0. Collective.

    Raises: ValueError on every rank when it cannot be told.
    """
    resolved = [ResolvedDtype("fp32", "")]
    with FailingTogether(lambda reasons: ValueError("; ".join(reasons))):
        if dist.get_rank() == 0:
            resolved = [resolve_dtype(role, model, head)]
    dist.broadcast_object_list(resolved, src=0)
    log.info("%s: %s, %s", role, resolved[0].name, resolved[0].why)
    return DTYPES[resolved[0].name]
