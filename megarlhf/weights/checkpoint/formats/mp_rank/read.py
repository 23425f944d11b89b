"""Reads Megatron-LM's older checkpoints: `iter_XXXXXXX/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, a file per rank.

The layout is taken from what the files hold (which names, how many layers, which shapes), and the stored args
have to agree with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.megatron_layout import MegatronLayout, ModelRank
from megarlhf.architectures.placements import Head
from megarlhf.placement import RankPlacements
from megarlhf.weights.checkpoint.formats.megatron.args import MegatronWeights, described_arch
from megarlhf.weights.checkpoint.formats.megatron.stored import NO_PARAMETERS, stored_args
from megarlhf.weights.checkpoint.formats.megatron.tracker import find_checkpoint
from megarlhf.weights.checkpoint.formats.mp_rank.legacy import core_names, reorder_qkv
from megarlhf.weights.checkpoint.formats.mp_rank.same_run import require_one_run
from megarlhf.weights.checkpoint.formats.torch_file.archive import read_torch_file
from megarlhf.weights.transport.extent import Extent

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
"""The second is of runs of 2022 with the distributed optimizer."""
VERSION = 3.0

_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_GROUPED = re.compile(r"\.mlp\.experts\.(weight1|linear_fc1\.weight\d+)$")
_EXPERT_BIAS = ".router.expert_bias"
_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"

ModelChunk = dict[str, Extent]


@dataclass(frozen=True, slots=True)
class _File:
    """Contents of one file, without the tensors' values."""

    path: Path
    chunks: list[ModelChunk]
    content: Mapping[str, Any]
    legacy: bool
    """Names from before Megatron-Core."""


def read_mp_rank(directory: str | PathLike[str], arch: Architecture | None = None) -> MegatronWeights:
    """Opens a checkpoint: a run's root, one `iter_XXXXXXX` or `release` in it. `arch` defaults to what args say.
    The parts are in the order of `layout.ranks()`.

    Raises: ValueError when files are missing or damaged, the layout is unclear or contradicts args, or the
    tensors are not exactly those of the architecture (every difference listed).
    """
    folder, _ = find_checkpoint(directory)
    paths = {} if folder is None else _find_files(folder)
    if folder is None or not paths:
        raise ValueError(
            f"{directory} has no mp_rank_* folders with {' or '.join(MODEL_FILES)}; give a run's root with its "
            "latest_checkpointed_iteration.txt, or one iteration's directory"
        )
    files = {index: _read_file(path) for index, path in paths.items()}
    require_one_run({file.path: file.content for file in files.values()})
    first = files[min(files)]
    stored_run = stored_args(first.content, first.path)
    args = stored_run.values
    grid = _grid(folder, files, args)
    layout, head, num_layers = _layout(folder, grid, args)
    arch = arch or described_arch(stored_run)
    if arch.num_layers != num_layers:
        raise ValueError(
            f"{folder} has {num_layers} layers, expected {arch.num_layers} of its description; "
            "name the Hugging Face directory that belongs to the checkpoint"
        )
    version = _version(first)
    parts = [reorder_qkv(part, arch, layout.tp, version, folder) for part in layout.parts(arch, head)]
    stored = [_storages(grid[at], layout.vpp) for at in layout.ranks()]
    biased = bool(args.get("moe_router_enable_expert_bias", not args))
    _check(folder, [grid[at].path for at in layout.ranks()], parts, stored, biased)
    extents = tuple(
        {name: of_rank[name] for name in part.storages} for part, of_rank in zip(parts, stored, strict=True)
    )
    return MegatronWeights(
        folder,
        tuple(parts),
        extents,
        args=args,
        foreign=stored_run.foreign(),
        arch=arch,
        head=head,
        layout=layout,
    )


# --- files ------------------------------------------------------------------------------------------


def _find_files(folder: Path) -> dict[tuple[int, ...], Path]:
    """The model's file by the numbers in its folder's name; folders of optimizer files alone are left out."""
    paths, empty = {}, []
    for path in sorted(folder.glob("mp_rank_*")):
        numbers = _FOLDER.fullmatch(path.name)
        if numbers is None or not path.is_dir():
            continue
        models = [path / name for name in MODEL_FILES if (path / name).is_file()]
        if models:
            paths[tuple(int(n) for n in numbers.groups() if n is not None)] = models[0]
        elif not any(path.glob("*optim*.pt")):
            empty.append(path.name)
    if empty:
        raise ValueError(
            f"{folder} has no {MODEL_FILES[0]} in {', '.join(empty)}; copy the missing files from the source"
        )
    return paths


def _read_file(path: Path) -> _File:
    content = read_torch_file(path, foreign=True)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected Megatron's dict with 'model'; is it one?")
    keys = ["model"] if "model" in content else [f"model{v}" for v in range(len(content)) if f"model{v}" in content]
    if not keys:
        raise ValueError(
            f"{path} has no 'model' or 'model0' among its keys ({', '.join(map(str, content))}); give a checkpoint "
            "that Megatron-LM saved"
        )
    named = [core_names(content[key], path) for key in keys]
    return _File(path, [chunk for chunk, _ in named], content, any(legacy for _, legacy in named))


def _int(args: Mapping[str, Any], key: str) -> int | None:
    value = args.get(key)
    return value if isinstance(value, int) else None


def _version(file: _File) -> float:
    """A missing version is 0 as in Megatron-LM; but Megatron-Core's models never had an order older than 3.0."""
    version = file.content.get("checkpoint_version", 0 if file.legacy else VERSION)
    if version not in (0, 1.0, 2.0, 3.0):
        raise ValueError(
            f"{file.path} has checkpoint_version {version!r}, expected 0, 1.0, 2.0 or 3.0; which tool wrote it?"
        )
    return float(version)


# --- layout -----------------------------------------------------------------------------------------


def _grid(folder: Path, files: Mapping[tuple[int, ...], _File], args: Mapping[str, Any]) -> dict[ModelRank, _File]:
    """The files by coordinates.

    Raises: ValueError when names are of several forms, or files are missing.
    """
    lengths = {len(index) for index in files}
    if len(lengths) > 1:
        raise ValueError(f"{folder} mixes mp_rank_TT, mp_rank_TT_PPP and mp_rank_TT_PPP_EEE; keep those of one run")
    (length,) = lengths
    experts = length == 2 and _second_is_expert(files)
    grid: dict[ModelRank, _File] = {}
    for index, file in files.items():
        tp, second, third = (*index, 0, 0)[:3]
        grid[ModelRank(0, second, tp) if experts else ModelRank(second, third, tp)] = file
    tensor = _int(args, "tensor_model_parallel_size") or _int(args, "model_parallel_size")
    sizes = {
        "pipeline": (max(at.pp for at in grid) + 1, _int(args, "pipeline_model_parallel_size")),
        "expert": (max(at.ep for at in grid) + 1, _int(args, "expert_model_parallel_size")),
        "tensor": (max(at.tp for at in grid) + 1, tensor),
    }
    pp, ep, tp = (max(count, stated or 1) for count, stated in sizes.values())
    ranks = MegatronLayout(tp=tp, pp=pp, ep=ep, padded_vocab=tp).ranks()
    missing = [folder_name(at, pp, ep) for at in ranks if at not in grid]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(ranks)} files (tensor {tp} x pipeline {pp} x expert {ep}): "
            f"{', '.join(missing)}; copy them from the source"
        )
    contradictions = [
        f"{kind} size {count}, args say {stated}"
        for kind, (count, stated) in sizes.items()
        if stated not in (None, count)
    ]
    if contradictions:
        raise ValueError(
            f"{folder} has folders of {'; '.join(contradictions)}; it mixes two runs: copy one of them again"
        )
    return grid


def _second_is_expert(files: Mapping[tuple[int, ...], _File]) -> bool:
    """Whether the second number counts expert ranks: they all hold the embedding, pipeline stages do not."""
    return all(any(_EMBEDDING in chunk for chunk in file.chunks) for file in files.values()) and len(files) > 1


def folder_name(at: ModelRank, pp: int, ep: int) -> str:
    return f"mp_rank_{at.tp:02d}" + (f"_{at.pp:03d}" if pp > 1 else "") + (f"_{at.ep:03d}" if ep > 1 else "")


def _layout(folder: Path, grid: Mapping[ModelRank, _File], args: Mapping[str, Any]) -> tuple[MegatronLayout, Head, int]:
    """The layout, the head and the number of layers that the files hold."""
    pp, ep, tp = (max(getattr(at, axis) for at in grid) + 1 for axis in ("pp", "ep", "tp"))
    first, last = grid[ModelRank(0, 0, 0)], grid[ModelRank(pp - 1, 0, 0)]
    vpp = len(first.chunks)
    embedding = first.chunks[0].get(_EMBEDDING)
    if embedding is None:
        raise ValueError(f"{first.path} has no {_EMBEDDING}, which the first stage of a GPT model holds; is it one?")
    padded = embedding.shape[0] * tp
    stated = _int(args, "padded_vocab_size")
    if stated not in (None, padded):
        raise ValueError(
            f"{first.path} holds {embedding.shape[0]} rows of the vocabulary, {padded} on {tp} tensor ranks, and "
            f"its args state padded_vocab_size = {stated}; files of two checkpoints are mixed: copy one again"
        )
    names = [name for file in grid.values() for chunk in file.chunks for name in chunk]
    head: Head = "lm"
    output = last.chunks[-1].get(_HEAD)
    if output is not None and output.shape[0] == 1 and embedding.shape[0] > 1:
        head = "scalar"
    layers_per_stage = _layers_per_stage(grid, pp, vpp)
    stated_vpp = _int(args, "virtual_pipeline_model_parallel_size")
    if args and vpp != (stated_vpp or 1):
        raise ValueError(
            f"{folder} holds {vpp} model chunks a rank and its args state virtual_pipeline_model_parallel_size = "
            f"{stated_vpp}; files of two checkpoints are mixed: copy one again"
        )
    layout = MegatronLayout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=ep,
        layers_per_stage=None if len(set(layers_per_stage)) == 1 else layers_per_stage,
        padded_vocab=padded,
        spec="te" if any(name.endswith("linear_qkv.layer_norm_weight") for name in names) else "local",
        experts="grouped" if any(_GROUPED.search(name) for name in names) else "each",
    )
    return layout, head, sum(layers_per_stage)


def _layers_per_stage(grid: Mapping[ModelRank, _File], pp: int, vpp: int) -> tuple[int, ...]:
    """Layers of each stage for a `MegatronLayout`: of each rank, where its chunks are alike, else of each chunk."""
    stages = []
    for stage in range(pp):
        file = grid[ModelRank(stage, 0, 0)]
        counts = [
            max((int(match[1]) + 1 for name in chunk if (match := _LAYER.match(name))), default=0)
            for chunk in file.chunks
        ]
        if len(counts) != vpp or not all(counts):
            raise ValueError(
                f"{file.path} holds model chunks of {counts} layers, expected {vpp} with layers; chunks without layers "
                "are not supported: let Megatron save the checkpoint with another layout"
            )
        stages.append(counts)
    if all(len(set(counts)) == 1 for counts in stages):
        return tuple(map(sum, stages))
    return tuple(counts[v] for v in range(vpp) for counts in stages)


def _storages(file: _File, vpp: int) -> dict[str, Extent]:
    prefixes = [f"model{v}." if vpp > 1 else "" for v in range(vpp)]
    return {p + name: extent for p, chunk in zip(prefixes, file.chunks, strict=True) for name, extent in chunk.items()}


def _check(
    folder: Path, paths: list[Path], parts: list[RankPlacements], extents: list[dict[str, Extent]], biased: bool
) -> None:
    """Raises ValueError that lists every tensor which is missing, not the model's, or of another shape."""
    problems = []
    harmless = NO_PARAMETERS if biased else (*NO_PARAMETERS, _EXPERT_BIAS)
    for path, part, stored in zip(paths, parts, extents, strict=True):
        folder_of_rank = path.parent.name
        problems += [f"{folder_of_rank}: {name} is missing" for name in part.storages if name not in stored]
        problems += [
            f"{folder_of_rank}: {name} has shape {stored[name].shape}, expected {shape}"
            for name, shape in part.storages.items()
            if name in stored and stored[name].shape != shape
        ]
        problems += [
            f"{folder_of_rank}: {name} is stored with strides {stored[name].strides}, expected without gaps"
            for name in part.storages
            if name in stored and stored[name].strides is not None
        ]
        problems += [
            f"{folder_of_rank}: {name} is not part of the model"
            for name in stored
            if name not in part.storages and not name.endswith(harmless)
        ]
    if problems:
        raise ValueError(
            f"{folder} differs from the model it is described as in {len(problems)} tensors: {'; '.join(problems)}. "
            "Check that the description (args, or the Hugging Face directory) belongs to the checkpoint"
        )
