"""Opens a model on disk, whatever its format: Hugging Face, Megatron's `torch_dist` or `mp_rank`, of any layout."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.hf_config import architecture_from_hf, hf_config, read_config
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import Head, head_name, table_of
from megarlhf.model_directory import find_hf_directory, find_part, find_parts, refuse_gguf
from megarlhf.placement import contiguous_strides
from megarlhf.weights.checkpoint.formats.huggingface.read import HFFiles, is_huggingface
from megarlhf.weights.checkpoint.formats.megatron.args import contradictions
from megarlhf.weights.checkpoint.formats.megatron.stored import stored_args
from megarlhf.weights.checkpoint.formats.megatron.tokenizers import stored_tokenizer
from megarlhf.weights.checkpoint.formats.megatron.tracker import TRACKER, Iteration, find_checkpoint
from megarlhf.weights.checkpoint.formats.mp_rank.read import MODEL_FILES, read_mp_rank
from megarlhf.weights.checkpoint.formats.torch_dist.read import place_saved
from megarlhf.weights.checkpoint.formats.torch_dist.saved import DistcpFormat, is_distcp, read_saved
from megarlhf.weights.checkpoint.formats.torch_file.archive import read_torch_file
from megarlhf.weights.checkpoint.staging import replaced_by
from megarlhf.weights.checks.replicas import require_equal_copies
from megarlhf.weights.transport.extent import CheckpointWeights, Extent

Format = DistcpFormat | Literal["huggingface", "mp_rank"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk, opened: nothing but headers has been read."""

    format: Format
    directory: Path
    """Path as the user gave it, or of a tree that other programs wrote the part with the weights."""
    weights: CheckpointWeights
    arch: Architecture
    head: Head
    config: Mapping[str, Any]
    """Contents of config.json, or of one made from Megatron's arguments."""
    companion: Path | None
    """Directory with config.json, tokenizer and other small files, if there is one."""
    tokenizer: Path | None = None
    """Directory with the tokenizer that the run saved in a Megatron checkpoint, if there is one."""
    layout: MegatronLayout | None = None
    """Layout of a Megatron checkpoint; for torch_dist that of the run that saved it, if stated."""
    iteration: Iteration | None = None
    args: Mapping[str, Any] | None = None
    """Megatron-LM's arguments."""
    foreign: Mapping[str, str] = field(default_factory=dict)
    """Arguments that are objects of other packages' classes, and those classes; they are not read."""


def detect_format(path: str | PathLike[str]) -> Format:
    """The format of a directory, by the names of its files: `torch_dist` for all formats in `.distcp` files.

    Raises: ValueError when it is none.
    """
    path = find_part(path)
    replaced = replaced_by(path)
    if not path.is_dir() and replaced.is_dir():
        raise ValueError(
            f"{path} is not there: a conversion that was to replace it was killed, and left it as {replaced}; run that "
            "conversion again, or rename it back"
        )
    if not path.is_dir():
        refuse_gguf(path)
        raise ValueError(f"{path} is not a directory; give a Hugging Face directory or a Megatron checkpoint")
    if is_huggingface(path):
        return "huggingface"
    folder, _ = find_checkpoint(path)
    iterations = [] if folder is not None else _iterations(path)
    if iterations:
        raise ValueError(
            f"{path} has no {TRACKER} that says which of its checkpoints is meant: {', '.join(iterations)}; name one "
            "of them, or write its number to that file"
        )
    if folder is None:
        refuse_gguf(path)
        _refuse_verl_fsdp(path)
        raise ValueError(
            f"{path} is no checkpoint: it has neither Hugging Face weights (model.safetensors, "
            f"pytorch_model.bin or their index), nor {TRACKER}, .metadata or mp_rank_* folders of Megatron, nor these "
            "in NeMo's folder weights or verl's actor, dist_ckpt or huggingface; give a directory that has"
        )
    return "torch_dist" if is_distcp(folder) else "mp_rank"


def _iterations(path: Path) -> list[str]:
    """Checkpoints of several iterations in a root: Megatron-LM's, verl's."""
    megatron = [folder.name for folder in path.glob("iter_*") if find_checkpoint(folder)[0]]
    return sorted([*megatron, *(step.name for step in path.glob("global_step_*") if find_parts(step))])


def _refuse_verl_fsdp(path: Path) -> None:
    """Raises: ValueError for checkpoints of verl's FSDP workers, which are pickled shards."""
    folders = (path, path / "actor", path / "critic", *path.glob("global_step_*/actor"))
    shards = next((file for folder in folders for file in folder.glob("model_world_size_*_rank_*.pt")), None)
    if shards is not None:
        raise ValueError(
            f"{path} holds the format of verl's FSDP workers ({shards.relative_to(path)}), which is not read; let verl "
            "write a Hugging Face directory (python -m verl.model_merger), and give that"
        )


def open_checkpoint(
    path: str | PathLike[str],
    *,
    hf: str | PathLike[str] | None = None,
    head: Head | None = None,
) -> Checkpoint:
    """Opens the model at `path`.

    `hf`: a Hugging Face directory whose config.json describes the model, for Megatron checkpoints that do not
    say enough. `head`: the head that is wanted where both are stored, or where the other may stay unused; a model
    that lacks it is opened with the head that it has.

    Raises: ValueError when the format or the architecture is unknown, files are missing or damaged, or the
    tensors are not exactly the architecture's (all differences listed).
    """
    path = find_part(path)
    format = detect_format(path)
    if format == "huggingface":
        return _open_huggingface(path, head)
    return _open_megatron(format, path, find_hf_directory(path, hf))


def require_scalar_head(checkpoint: Checkpoint) -> None:
    """Raises ValueError for a language model where the scores of a reward model or the values of a critic are read."""
    if checkpoint.head != "scalar":
        raise ValueError(
            f"{checkpoint.directory} is a language model: it has no scalar head, and a random one would give random "
            "scores; give a reward model (`megarlhf rm` trains one), or, for a critic only, which learns its head, "
            "set critic.model.fresh_head to true"
        )


def _open_huggingface(path: Path, wanted_head: Head | None) -> Checkpoint:
    config = read_config(path)
    arch = architecture_from_hf(config)
    files = HFFiles(path)
    lm_head, score = head_name(arch, "lm"), head_name(arch, "scalar")
    head: Head = "scalar" if score in files.tensors and wanted_head != "lm" else "lm"
    if head == "scalar" and (shape := files.tensors[score].shape)[:1] != (1,):
        raise ValueError(
            f"{path} is a classifier of {shape[0]} labels ({score} has so many rows), and a reward model or a critic "
            "has one score; as a reward it is {kind: classifier, path: ..., classifier_label: ...}; to train one, "
            "give a model with one score (`megarlhf rm` makes it of a language model)"
        )
    # A tied model's files may repeat the embedding as head; a loader may leave the head that it does not want.
    unused = {lm_head} if arch.tied_embeddings or wanted_head == "scalar" else set()
    if wanted_head == "lm":
        unused.add(score)
    weights = files.weights(arch, head, extra=unused)
    if arch.tied_embeddings and head == "lm" and lm_head in files.tensors:
        _require_tied(path, weights, arch, files.tensors[lm_head])
    return Checkpoint(
        format="huggingface", directory=path, weights=weights, arch=arch, head=head, config=config, companion=path
    )


def _require_tied(path: Path, weights: CheckpointWeights, arch: Architecture, lm_head: Extent) -> None:
    """transformers does not tie a model whose files hold two different tensors, whatever config.json says."""
    embedding = table_of(arch).embedding[0].tensors[0][0]
    (part,) = weights.parts
    (original,) = (p for p in part.placements if p.tensor == embedding)
    repeated = replace(original, storage=_STORED_HEAD, strides=contiguous_strides(lm_head.shape))
    if lm_head.shape != original.box.shape or lm_head.strides is not None:
        raise ValueError(f"{path} stores a head of shape {lm_head.shape} beside the embedding that it is tied to")
    both = replace(part, placements=(original, repeated))
    require_equal_copies(
        path, [both], [{**weights.extents[0], _STORED_HEAD: lm_head}], lambda p: p.storage == _STORED_HEAD
    )


_STORED_HEAD = "the stored head"


def _advice(problems: Sequence[str]) -> str:
    """Advice where a config.json and arguments contradict each other."""
    if any("no family computes" in problem for problem in problems):
        return "No config.json can state what the arguments say: such a model is not supported"
    return (
        "Name the Hugging Face directory that belongs to the checkpoint (--reference-hf, in a run model.hf), or "
        "correct that config.json"
    )


def _open_megatron(format: Format, path: Path, companion: Path | None) -> Checkpoint:
    folder, iteration = find_checkpoint(path)
    assert folder is not None
    arch = None if companion is None else architecture_from_hf(companion)
    saved = read_saved(folder) if format == "torch_dist" else None
    if arch is not None:
        problems = contradictions(arch, saved.args.values if saved is not None else _first_args(folder))
        if problems:
            raise ValueError(
                f"config.json of {companion} describes another model than the args of {folder}, in {len(problems)} "
                f"points: {'; '.join(problems)}. {_advice(problems)}"
            )
    opened = read_mp_rank(folder, arch) if saved is None else place_saved(saved, arch)
    if saved is None and opened.head == "lm" and opened.arch.tied_embeddings:
        require_equal_copies(folder, opened.parts, opened.extents, lambda p: p.storage.endswith("output_layer.weight"))
    if opened.foreign:
        shown = ", ".join(f"{name} ({kind})" for name, kind in opened.foreign.items())
        log.info("%s: arguments that are objects of other packages are not read: %s", folder, shown)
    return Checkpoint(
        format=format if saved is None else saved.format,
        directory=path,
        weights=CheckpointWeights(path, opened.parts, opened.extents),
        arch=opened.arch,
        head=opened.head,
        config=hf_config(opened.arch, opened.head) if companion is None else read_config(companion),
        companion=companion,
        tokenizer=stored_tokenizer(folder, opened.args),
        layout=opened.layout,
        iteration=iteration,
        args=opened.args,
        foreign=opened.foreign,
    )


def _first_args(folder: Path) -> Mapping[str, Any]:
    """Arguments in the first of mp_rank files, before anything is compared with an architecture."""
    first = min((path for name in MODEL_FILES for path in folder.glob(f"mp_rank_*/{name}")), default=None)
    return {} if first is None else stored_args(read_torch_file(first, foreign=True), first).values
