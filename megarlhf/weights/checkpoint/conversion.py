"""Converts a stored model to another format or layout: one copy plan from files to files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from megarlhf.architectures.hf_config import hf_config
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import Experts, Spec, hf_placements, logical_tensors, padded_vocab_size
from megarlhf.data.tokenizers.files import has_tokenizer
from megarlhf.model_directory import COMPANION
from megarlhf.placement import RankPlacements
from megarlhf.provenance import carry_provenance
from megarlhf.weights.checkpoint.checksums import write_checksums
from megarlhf.weights.checkpoint.formats.huggingface.write import MAX_SHARD_BYTES, preallocate_huggingface
from megarlhf.weights.checkpoint.formats.megatron.args import args_of
from megarlhf.weights.checkpoint.formats.megatron.tokenizers import tokenizer_place
from megarlhf.weights.checkpoint.formats.mp_rank.write import preallocate_mp_rank
from megarlhf.weights.checkpoint.formats.torch_dist.write import preallocate_torch_dist
from megarlhf.weights.checkpoint.hf_writer import copy_other_files, other_files, read_other_files
from megarlhf.weights.checkpoint.open_checkpoint import Checkpoint
from megarlhf.weights.checkpoint.replaceable import require_replaceable
from megarlhf.weights.checkpoint.scorer_padding import with_padding
from megarlhf.weights.checkpoint.staging import Staging
from megarlhf.weights.checks.replicas import require_equal_replicas
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.extent import Extent
from megarlhf.weights.transport.file_copy import transfer

log = logging.getLogger(__name__)

Planned = tuple[Sequence[RankPlacements], Sequence[Mapping[str, Extent]]]

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Target(Protocol):
    """Output of a conversion: placements first, then the files that hold them."""

    def parts(self, source: Checkpoint) -> Sequence[RankPlacements]: ...

    def plan(self, directory: Path, source: Checkpoint, dtype: torch.dtype) -> Planned: ...


@dataclass(frozen=True, kw_only=True)
class HuggingFaceTarget:
    """safetensors with config.json and whatever small files the source has."""

    max_shard_bytes: int = MAX_SHARD_BYTES

    def parts(self, source: Checkpoint) -> Sequence[RankPlacements]:
        return [hf_placements(source.arch, source.head)]

    def plan(self, directory: Path, source: Checkpoint, dtype: torch.dtype) -> Planned:
        (part,) = self.parts(source)
        config = _write_small_files(source, directory, dtype)
        carry_provenance(source.directory, directory)
        specs = {name: (shape, dtype) for name, shape in part.storages.items()}
        return [part], [preallocate_huggingface(directory, specs, config, max_shard_bytes=self.max_shard_bytes)]


@dataclass(frozen=True, kw_only=True)
class MegatronTarget:
    """A Megatron checkpoint of a layout."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    format: Literal["torch_dist", "mp_rank"] = "torch_dist"
    spec: Spec = "te"
    experts: Experts = "each"
    vocab_multiple: int | None = None
    """The vocabulary is padded to a multiple of this x tp; default: what the source says, else 128."""
    padded_vocab: int | None = None
    """Rows in all, if stated; wins."""

    def layout(self, source: Checkpoint) -> MegatronLayout:
        """Raises: ValueError when a stated vocabulary is too small or does not divide by tp."""
        vocab, multiple = source.arch.vocab_size, self._multiple(source)
        padded = self.padded_vocab or padded_vocab_size(vocab, self.tp, multiple)
        if padded < vocab or padded % self.tp:
            raise ValueError(
                f"padded vocabulary of {padded} rows: expected at least the model's {vocab}, and a multiple of tp = "
                f"{self.tp}; use {padded_vocab_size(vocab, self.tp, multiple)}, or leave it out"
            )
        return MegatronLayout(
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            ep=self.ep,
            layers_per_stage=self.layers_per_stage,
            padded_vocab=padded,
            spec=self.spec,
            experts=self.experts if source.arch.num_experts else "each",
        )

    def _multiple(self, source: Checkpoint) -> int:
        return int(self.vocab_multiple or (source.args or {}).get("make_vocab_size_divisible_by") or 128)

    def parts(self, source: Checkpoint) -> Sequence[RankPlacements]:
        return self.layout(source).parts(source.arch, source.head)

    def plan(self, directory: Path, source: Checkpoint, dtype: torch.dtype) -> Planned:
        layout = self.layout(source)
        args = args_of(source.arch, layout, dtype)
        if self.padded_vocab is None:
            args["make_vocab_size_divisible_by"] = self._multiple(source)
        folder = directory / COMPANION
        folder.mkdir()
        config = _write_small_files(source, folder, dtype)
        carry_provenance(source.directory, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write = preallocate_torch_dist if self.format == "torch_dist" else preallocate_mp_rank
        iteration = "release" if source.iteration is None else source.iteration
        return write(directory, source.arch, layout, source.head, dtype, args, iteration)


def convert(
    source: Checkpoint,
    out: str | PathLike[str],
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    force: bool = False,
    workers: int | None = None,
    checksums: bool = False,
    started: Callable[[int], None] = lambda total_bytes: None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> int:
    """Writes the source as `target` to `out`, which appears whole or not at all; returns the bytes of its tensors.

    `dtype` defaults to the source's. `checksums` states the CRC-32 of every tensor in a Megatron checkpoint, for
    `inspect --check`; torch does without. `started` gets the bytes to write, `progress` those written since.

    Raises: ValueError when the layout does not fit the model, the output exists (without `force`), or the source
    is short, or its ranks disagree; OSError when the disk is full, before anything is written if it can be known.
    """
    dtype = _written_dtype(source, dtype)
    if force:
        require_replaceable(Path(out), source.directory)
    target.parts(source)  # a layout that does not fit is refused before the disk is touched
    require_equal_replicas(source.weights)
    if source.foreign:
        names = ", ".join(f"{name} ({kind})" for name, kind in source.foreign.items())
        log.warning("%s: arguments of other packages' classes are not read: %s", source.directory, names)
    tensors = logical_tensors(source.arch, source.head)
    at_least = sum(torch.Size(shape).numel() for shape in tensors.values()) * dtype.itemsize
    beside = [] if source.companion is None else other_files(source.companion)
    with Staging(out, force=force) as staging:
        staging.reserve(at_least + sum(path.stat().st_size for path in beside))
        planned, extents = target.plan(staging.path, source, dtype)
        total = sum(extent.num_bytes for of_part in extents for extent in of_part.values())
        staging.reserve(total)  # everything but the tensors is written already
        first = len(source.weights.parts)
        destinations = [part.on_rank(first + number) for number, part in enumerate(planned)]
        plan = make_plan(source.weights.parts, destinations)
        started(total)
        transfer(plan, source.weights.extents, extents, first_destination=first, workers=workers, progress=progress)
        if checksums:
            write_checksums(staging.path, workers=workers)
    return total


def _written_dtype(source: Checkpoint, requested: torch.dtype | None) -> torch.dtype:
    """`requested`, or the one dtype of the source's tensors.

    Raises: ValueError when there are several and none is requested, or when they are not numbers of a model.
    """
    dtypes = source.weights.dtypes()
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    if not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        raise ValueError(
            f"{source.directory} has tensors of {', '.join(names)}: quantized values are not the model's; use it in "
            "bf16, fp16 or fp32"
        )
    if requested is None and len(dtypes) > 1:
        total = sum(dtypes.values())
        shares = ", ".join(f"{name} ({n / total:.1%})" for name, n in zip(names, dtypes.values(), strict=True))
        raise ValueError(f"{source.directory} mixes dtypes: {shares} of its bytes; say which to write: --dtype")
    return requested or next(iter(dtypes))


def _write_small_files(source: Checkpoint, directory: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Write the small files that belong beside the weights. Returns config.json, which the caller writes."""
    if source.companion is not None:
        copy_other_files(source.companion, directory)
    if source.tokenizer is not None and not has_tokenizer(directory):
        copy_other_files(source.tokenizer, directory)
    if not has_tokenizer(directory):
        named = tokenizer_place(source.args or {})
        log.warning(
            "%s has no tokenizer%s, and what is written has none: copy the tokenizer's files beside its config.json",
            source.directory,
            f" (it was trained with {named})" if named else "",
        )
    config = stated_config(source, dtype)
    if source.head == "scalar":
        config, changed = with_padding(config, read_other_files(directory))
        for name, content in changed.items():
            (directory / name).write_bytes(content)
    return config


def stated_config(source: Checkpoint, dtype: torch.dtype) -> dict[str, Any]:
    """config.json for the source's model with weights of this dtype and the head that they have."""
    config = dict(source.config)
    derived = hf_config(source.arch, source.head)
    if source.head == "scalar" or "architectures" not in config:
        config.update({key: derived[key] for key in ("architectures", "num_labels") if key in derived})
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {**config, key: str(dtype).removeprefix("torch.")}
