"""Weights of a role: placements on each rank, loading, export, digests."""

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
from megarlhf.collective_errors import from_first_rank, raise_on_all_ranks
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
    """Placements on the ranks of this rank's replica, which together hold the model once."""
    return [placements_on(shard, rank) for rank in shard.mesh.replica_ranks]


def load_weights(shard: ModelShard, model: ModelConfig, *, seed: int, new_head: bool = False) -> None:
    """Fill every parameter from a checkpoint of any format and layout, or at random. Random weights are the same at
    every layout. Each rank reads its own boxes only.

    new_head: a scalar role may start from a language model, with a random head. It suits a reward model, which learns
        differences of scores. With `model.fresh_head` the head starts at zero. It suits a critic: a random head would
        spread values wider than the returns (OpenAI's lm-human-preferences does the same).
    Raises: ValueError for a scalar role whose checkpoint and adapter have no scalar head, unless `new_head` or
        `model.fresh_head` allows a new one.
    """
    placements = placements_on(shard, shard.mesh.runtime.rank)
    parameters = shard.parameters()
    check_storages(placements, parameters)
    std = float(read_config(model.hf_directory()).get("initializer_range", INITIALIZER_RANGE))
    if model.random_init:
        fill_random(placements, parameters, seed=seed, std=std, arch=shard.arch, head=shard.head)
        if shard.adapter_path is not None:
            _load_adapter(shard, placements, parameters, seed=seed)
        return
    checkpoint = open_checkpoint(model.path, hf=model.hf, head=shard.head)
    is_scalar = shard.head == "scalar"
    skips_head = is_scalar and (model.fresh_head or checkpoint.head != "scalar")
    adapter_has_head = is_scalar and shard.adapter_path is not None and brings_head(shard.adapter_path, shard.arch)
    if skips_head and not (adapter_has_head or new_head or model.fresh_head):
        require_scalar_head(checkpoint)
    head_tensor = {head_name(shard.arch, "scalar")} if skips_head else set()
    skipped = frozenset(head_tensor & placements.tensors.keys())
    load_from_files(placements, checkpoint.weights, parameters, skip=skipped | adapter_tensors(shard.arch))
    if is_scalar:
        origin = ("starts at random" if new_head else "starts at zero") if skips_head else "is loaded"
        log.info("%s: the scalar head %s", model.path, "is that of the adapter" if adapter_has_head else origin)
    if skipped and not adapter_has_head:
        if new_head:
            fill_random(placements, parameters, seed=seed, std=std, arch=shard.arch, head=shard.head, only=skipped)
        else:
            fill_zeros(placements, parameters, only=skipped)
    if shard.arch.adapter is not None:
        _load_adapter(shard, placements, parameters, seed=seed)


def _load_adapter(shard: ModelShard, placements: RankPlacements, parameters: Storages, *, seed: int) -> None:
    """Fill A and B from files, or as a new adapter. Files may also have a scalar head."""
    names = adapter_tensors(shard.arch)
    if shard.adapter_path is None:
        only = frozenset(names & placements.tensors.keys())
        fill_random(placements, parameters, seed=seed, std=1.0, arch=shard.arch, head=shard.head, only=only)
        return
    adapter = open_adapter(shard.adapter_path)
    if shard.head == "scalar" and brings_head(shard.adapter_path, shard.arch):
        names |= {head_name(shard.arch, "scalar")}
    shapes = {name: shape for name, shape in logical_tensors(shard.arch, shard.head).items() if name in names}
    load_from_files(placements.select(sorted(names)), adapter.weights(shapes), parameters)
    _require_base(shard, shard.adapter_path)


def _require_base(shard: ModelShard, adapter: Path) -> None:
    """Require that the model is the one that the adapter was trained on, if the adapter's files state it in this dtype.
    Collective among the ranks that have the model.

    Raises: ValueError on all of these ranks.
    """
    provenance = read_provenance(adapter)
    base = None if provenance is None else provenance.adapter_of
    dtype = str(shard.dtype).removeprefix("torch.")
    if base is None or not shard.mesh.is_member:
        return
    if base.dtype != dtype:
        if shard.mesh.runtime.rank == shard.mesh.layout.first:
            message = "lora.path = %s: its base is not checked, since it was trained in %s and is put on a model in %s"
            log.warning(message, adapter, base.dtype, dtype)
        return
    digest = digest_of_shard(shard.base, head=False)
    if digest != base.digest:
        raise ValueError(
            f"lora.path = {adapter} is an adapter of another base: by {FILE} beside it, it was trained on {base.path} "
            f"with digest {base.digest}, but this model has digest {digest}; set model.path to the adapter's base"
        )


def export_hugging_face(
    shard: ModelShard,
    source: Path,
    directory: Path,
    config_overrides: Mapping[str, Any] = _NOTHING,
    files: Mapping[str, bytes] = _NOTHING,
) -> None:
    """Write the live model, with its adapter merged, as a Hugging Face directory. Config and tokenizer come from
    `source`, except for `config_overrides` of config.json (None removes a key) and for `files`.

    Collective over the ranks of the first replica; the others return at once.
    """
    if shard.mesh.replica != 0:
        return
    config, files = _config_and_files(shard, source, config_overrides, files)
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
    """Write the live adapter, and any scalar head, in PEFT's format. `base`: path of the base model.

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
    """Digest of the live model, the same at every layout. `head=False` leaves out the scalar head, which an adapter
    brings along. Collective among the ranks that have the model."""
    names = list(logical_tensors(shard.arch, shard.head))
    if not head:
        names = [name for name in names if name != head_name(shard.arch, "scalar")]
    return _digest(shard, names)


def digest_of_adapter(shard: ModelShard) -> str:
    """Digest of the live adapter's A and B, the same at every layout. Collective as `digest_of_shard`."""
    return _digest(shard, sorted(adapter_tensors(shard.arch)))


def _digest(shard: ModelShard, names: Sequence[str]) -> str:
    mesh = shard.mesh
    placements = [on_rank.select(names) for on_rank in replica_placements(shard)]
    own_digests, _ = replica_digests(mesh.runtime.rank, placements, shard.parameters(), dtype=shard.dtype)
    return whole_digest(summed([own_digests], names, mesh.runtime.device, mesh.groups.tp_ep_pp)[0])


def companion_folder(
    shard: ModelShard,
    source: Path,
    config_overrides: Mapping[str, Any] = _NOTHING,
    files: Mapping[str, bytes] = _NOTHING,
) -> dict[str, bytes]:
    """Files of the folder `hf/` in a Megatron checkpoint of the live model, by path in the checkpoint. Arguments as in
    `export_hugging_face`."""
    config, files = _config_and_files(shard, source, config_overrides, files)
    text = json.dumps(config, indent=2) + "\n"
    contents = {"config.json": text.encode(), **read_other_files(source), **files}
    return {f"{COMPANION}/{name}": content for name, content in contents.items()}


class WeightSource(Protocol):
    """Source of a role's weights. Both calls are collective."""

    def dtype(self, role: str, model: ModelConfig, head: Head) -> torch.dtype:
        """See `parameter_dtype`."""
        ...

    def load(self, shard: ModelShard, model: ModelConfig, *, seed: int, new_head: bool) -> None:
        """See `load_weights`."""
        ...


class _Checkpoints:
    """Weights from the checkpoint in `model` of the role's section."""

    def dtype(self, role: str, model: ModelConfig, head: Head) -> torch.dtype:
        return parameter_dtype(role, model, head)

    def load(self, shard: ModelShard, model: ModelConfig, *, seed: int, new_head: bool) -> None:
        load_weights(shard, model, seed=seed, new_head=new_head)


CHECKPOINTS: WeightSource = _Checkpoints()


def _config_and_files(
    shard: ModelShard, source: Path, overrides: Mapping[str, Any], files: Mapping[str, bytes]
) -> tuple[dict[str, Any], Mapping[str, bytes]]:
    """The config.json of `source` for the head and the dtype of the live model, and the files that replace others."""
    config = read_config(source)
    config["architectures"] = [hf_class(shard.arch.model_type, shard.head)]
    if shard.head == "scalar":
        config["num_labels"] = 1
    removed = {key for key, value in overrides.items() if value is None}
    config = {key: value for key, value in (config | dict(overrides)).items() if key not in removed}
    if shard.head == "scalar":
        config, changed = with_padding(config, {**read_other_files(source), **files})
        files = {**files, **changed}
    return with_dtype(config, shard.dtype), files


def parameter_dtype(role: str, model: ModelConfig, head: Head) -> torch.dtype:
    """The dtype of a role's parameters, chosen by rank 0 for all ranks. Collective.

    Raises: ValueError on every rank when the dtype cannot be determined.
    """
    resolved = ResolvedDtype("fp32", "")
    with raise_on_all_ranks(lambda reasons: ValueError("; ".join(reasons))):
        if dist.get_rank() == 0:
            resolved = resolve_dtype(role, model, head)
    resolved = from_first_rank(resolved)
    log.info("%s: %s, %s", role, resolved.name, resolved.why)
    return DTYPES[resolved.name]
