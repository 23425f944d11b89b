"""A role's weights, moved by copy plans: where they stand on each rank, loading, export."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarlhf.architectures.adapters import adapter_tensors
from megarlhf.architectures.hf_config import hf_class, read_config
from megarlhf.architectures.placements import Head, head_name, logical_tensors
from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.config import ModelConfig
from megarlhf.model_directory import COMPANION
from megarlhf.models.build import ModelShard, placements_on
from megarlhf.models.settings import DTYPES
from megarlhf.placement import RankPlacements
from megarlhf.provenance import FILE, read_provenance
from megarlhf.weights.checkpoint.dtype import ResolvedDtype, resolve_dtype
from megarlhf.weights.checkpoint.export import export, gather, with_dtype
from megarlhf.weights.checkpoint.hf_writer import read_other_files
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint, require_scalar_head
from megarlhf.weights.checkpoint.peft import adapter_config, brings_head, open_adapter, write_adapter
from megarlhf.weights.checkpoint.scorer_padding import with_padding
from megarlhf.weights.checks.digest import replica_digests, summed, whole_digest
from megarlhf.weights.transport.random_init import fill_random, fill_zeros
from megarlhf.weights.transport.storages import Storages, check_storages, load_from_files

log = logging.getLogger(__name__)

_NOTHING: Mapping[str, Any] = MappingProxyType({})
INITIALIZER_RANGE = 0.02
"""Standard deviation of random weights where config.json has no `initializer_range`; Hugging Face's default."""


def replica_placements(shard: ModelShard) -> list[RankPlacements]:
    """The ranks of this rank's copy of the model, which together hold it once."""
    return [placements_on(shard, rank) for rank in shard.mesh.replica_ranks]


def load_weights(shard: ModelShard, model: ModelConfig, *, seed: int, new_head: bool = False) -> None:
    """Fill every parameter: from a checkpoint of any format and layout, or at random, the same at every layout.

    Each rank reads just its boxes. `new_head`: a scalar role may start from a language model, with a random head (of a
    reward model, which learns differences of scores). With `model.fresh_head` its head starts at zero (of a critic,
    whose values a random one would spread wider than the returns; as OpenAI's lm-human-preferences).

    Raises: ValueError for a scalar role whose checkpoint and adapter have no scalar head, where neither `new_head` nor
    `model.fresh_head` allows a new one.
    """
    mine = placements_on(shard, shard.mesh.runtime.rank)
    live = shard.parameters()
    check_storages(mine, live)
    std = float(read_config(model.hf_directory()).get("initializer_range", INITIALIZER_RANGE))
    if model.random_init:
        fill_random(mine, live, seed=seed, std=std, arch=shard.arch, head=shard.head)
        if shard.adapter_path is not None:
            _load_adapter(shard, mine, live, seed=seed)
        return
    checkpoint = open_checkpoint(model.path, hf=model.hf, head=shard.head)
    score = head_name(shard.arch, "scalar")
    unread = shard.head == "scalar" and (model.fresh_head or checkpoint.head != "scalar")
    brought = shard.head == "scalar" and shard.adapter_path is not None and brings_head(shard.adapter_path, shard.arch)
    if unread and not (brought or new_head or model.fresh_head):
        require_scalar_head(checkpoint)
    fresh = frozenset({score} & mine.tensors.keys()) if unread else frozenset()
    load_from_files(mine, checkpoint.weights, live, skip=fresh | adapter_tensors(shard.arch))
    if shard.head == "scalar":
        how = ("starts at random" if new_head else "starts at zero") if unread else "is loaded"
        log.info("%s: the scalar head %s", model.path, "is that of the adapter" if brought else how)
    if fresh and not brought:
        if new_head:
            fill_random(mine, live, seed=seed, std=std, arch=shard.arch, head=shard.head, only=fresh)
        else:
            fill_zeros(mine, live, only=fresh)
    if shard.arch.adapter is not None:
        _load_adapter(shard, mine, live, seed=seed)


def _load_adapter(shard: ModelShard, mine: RankPlacements, live: Storages, *, seed: int) -> None:
    """Fill A and B, and the scalar head where the adapter's files have it: from files, or as a new adapter."""
    names = adapter_tensors(shard.arch)
    if shard.adapter_path is None:
        only = frozenset(names & mine.tensors.keys())
        fill_random(mine, live, seed=seed, std=1.0, arch=shard.arch, head=shard.head, only=only)
        return
    stored = open_adapter(shard.adapter_path)
    if shard.head == "scalar" and brings_head(shard.adapter_path, shard.arch):
        names |= {head_name(shard.arch, "scalar")}
    shapes = {name: shape for name, shape in logical_tensors(shard.arch, shard.head).items() if name in names}
    load_from_files(mine.select(sorted(names)), stored.weights(shapes), live)
    _require_base(shard, shard.adapter_path)


def _require_base(shard: ModelShard, adapter: Path) -> None:
    """Where it is stated on which model an adapter was trained, in this dtype, it must be this one. Collective among
    the ranks that have the model.

    Raises: ValueError on all of them.
    """
    stated = read_provenance(adapter)
    base = None if stated is None else stated.adapter_of
    dtype = str(shard.dtype).removeprefix("torch.")
    if base is None or not shard.mesh.is_member:
        return
    if base.dtype != dtype:
        if shard.mesh.runtime.rank == shard.mesh.layout.first:
            said = "lora.path = %s: that this is its base is not checked: trained in %s, put on %s"
            log.warning(said, adapter, base.dtype, dtype)
        return
    digest = digest_of_shard(shard.base, head=False)
    if digest != base.digest:
        raise ValueError(
            f"lora.path = {adapter} is an adapter of another base: {FILE} beside it says that it was trained on "
            f"{base.path}, digest {base.digest}, and the model it is put on has digest {digest}; give model.path that "
            "model"
        )


def export_hugging_face(
    shard: ModelShard,
    source: Path,
    directory: Path,
    stated: Mapping[str, Any] = _NOTHING,
    files: Mapping[str, bytes] = _NOTHING,
) -> None:
    """Write the live model, with its adapter merged, as a Hugging Face directory; config and tokenizer come from
    `source`, but for what is `stated` of config.json (None: that key is left out), and for `files`.

    Collective over the ranks of the first replica; the others return at once.
    """
    if shard.mesh.replica != 0:
        return
    config, files = _small_files(shard, source, stated, files)
    replica = replica_placements(shard.base)
    export(
        replica,
        shard.merged(),
        directory,
        arch=shard.arch.base,
        config=config,
        dtype=shard.dtype,
        rank=shard.mesh.runtime.rank,
        head=shard.head,
        writer_rank=replica[0].rank,
        group=shard.mesh.groups.tp_ep_pp,
        copy_from=source,
        files=files,
    )


def export_adapter(shard: ModelShard, base: Path, directory: Path) -> None:
    """Write the live adapter, and a scalar head, as PEFT does; `base` is the model that it is on.

    Collective over the ranks of the first replica; the others return at once.
    """
    if shard.mesh.replica != 0:
        return
    assert shard.arch.adapter is not None
    replica, rank = replica_placements(shard), shard.mesh.runtime.rank
    names = adapter_tensors(shard.arch) | ({head_name(shard.arch, "scalar")} if shard.head == "scalar" else set())
    tensors = {name: shape for name, shape in logical_tensors(shard.arch, shard.head).items() if name in names}
    owned = {replica[0].rank: list(tensors)}
    whole = gather(replica, shard.parameters(), owned, tensors, rank, shard.dtype, shard.mesh.groups.tp_ep_pp)
    if rank == replica[0].rank:
        config = adapter_config(shard.arch.adapter, shard.arch, shard.head, str(base))
        write_adapter(directory, config, {name: tensor.cpu() for name, tensor in whole.items()})


def digest_of_shard(shard: ModelShard, *, head: bool = True) -> str:
    """Of the live model, the same at every layout; without its scalar head, which an adapter brings along, where not
    `head`. Collective among the ranks that have it."""
    names = list(logical_tensors(shard.arch, shard.head))
    if not head:
        names = [name for name in names if name != head_name(shard.arch, "scalar")]
    return _digest(shard, names)


def digest_of_adapter(shard: ModelShard) -> str:
    """Of A and B of the live adapter. Collective as above."""
    return _digest(shard, sorted(adapter_tensors(shard.arch)))


def _digest(shard: ModelShard, names: Sequence[str]) -> str:
    mesh = shard.mesh
    parts = [part.select(names) for part in replica_placements(shard)]
    mine, _ = replica_digests(mesh.runtime.rank, parts, shard.parameters(), dtype=shard.dtype)
    return whole_digest(summed([mine], names, mesh.runtime.device, mesh.groups.tp_ep_pp)[0])


def companion_files(
    shard: ModelShard, source: Path, stated: Mapping[str, Any] = _NOTHING, files: Mapping[str, bytes] = _NOTHING
) -> dict[str, bytes]:
    """The folder `hf/` of a Megatron checkpoint of the live model, by path in the checkpoint; from the model directory
    `source`, as above."""
    config, files = _small_files(shard, source, stated, files)
    text = json.dumps(config, indent=2) + "\n"
    every = {"config.json": text.encode(), **read_other_files(source), **files}
    return {f"{COMPANION}/{name}": content for name, content in every.items()}


class WeightSource(Protocol):
    """Where a role's weights come from. Both calls are collective."""

    def dtype(self, role: str, model: ModelConfig, head: Head) -> torch.dtype:
        """See `parameter_dtype`."""
        ...

    def load(self, shard: ModelShard, model: ModelConfig, *, seed: int, new_head: bool) -> None:
        """See `load_weights`."""
        ...


class _Checkpoints:
    """As `model` of the role's section says."""

    def dtype(self, role: str, model: ModelConfig, head: Head) -> torch.dtype:
        return parameter_dtype(role, model, head)

    def load(self, shard: ModelShard, model: ModelConfig, *, seed: int, new_head: bool) -> None:
        load_weights(shard, model, seed=seed, new_head=new_head)


CHECKPOINTS: WeightSource = _Checkpoints()


def _small_files(
    shard: ModelShard, source: Path, stated: Mapping[str, Any], files: Mapping[str, bytes]
) -> tuple[dict[str, Any], Mapping[str, bytes]]:
    """The config.json of `source`, for the head and the dtype of the live model; and the files in place of others."""
    config = read_config(source)
    config["architectures"] = [hf_class(shard.arch.model_type, shard.head)]
    if shard.head == "scalar":
        config["num_labels"] = 1
    left_out = {key for key, value in stated.items() if value is None}
    config = {key: value for key, value in (config | dict(stated)).items() if key not in left_out}
    if shard.head == "scalar":
        config, changed = with_padding(config, {**read_other_files(source), **files})
        files = {**files, **changed}
    return with_dtype(config, shard.dtype), files


def parameter_dtype(role: str, model: ModelConfig, head: Head) -> torch.dtype:
    """The dtype of a role's parameters: one for all ranks, found by rank 0. Collective.

    Raises: ValueError on every rank when it cannot be told.
    """
    resolved = [ResolvedDtype("fp32", "")]
    with raise_on_all_ranks(lambda reasons: ValueError("; ".join(reasons))):
        if dist.get_rank() == 0:
            resolved = [resolve_dtype(role, model, head)]
    dist.broadcast_object_list(resolved, src=0)
    log.info("%s: %s, %s", role, resolved[0].name, resolved[0].why)
    return DTYPES[resolved[0].name]
