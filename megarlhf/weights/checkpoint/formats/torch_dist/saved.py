"""Directories of `.distcp` files: which format, which arguments, and the tensors under the keys of `torch_dist`.

Three formats share these files. `torch_dist` is Megatron-Core's own: its keys are those of one model without any
parallelism. `torch_dcp` (of torch's FSDP2) and `fsdp_dtensor` (of Megatron-FSDP) are plain
torch.distributed.checkpoint: the run's state dict, flattened, with the model's parameters below `model.`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarlhf.architectures.adapters import is_adapter_tensor
from megarlhf.weights.checkpoint.formats.megatron.stored import NO_PARAMETERS, StoredArgs, stored_args
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import (
    COMMON,
    COMMON_STATE,
    CONFIG,
    METADATA,
    GlobalTensor,
    SavedState,
    read_metadata,
)
from megarlhf.weights.checkpoint.formats.torch_file.archive import read_torch_file

DistcpFormat = Literal["torch_dist", "torch_dcp", "fsdp_dtensor"]

EMBEDDING = "embedding.word_embeddings.weight"

_OPTIMIZER = ("optimizer.", "chained_")
_MODEL = re.compile(r"model\d*\.")
_FIRST = re.compile(rf"((?:model\d*\.)?(?:module\.)*){re.escape(EMBEDDING)}")
_EXPERTS = (
    (re.compile(r"(\.mlp\.experts\.)local_experts\.(\d+)\."), r"\1experts.\2."),
    (re.compile(r"(\.mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)(_[wv])?$"), r"\1experts.\3.\2\4"),
)
"""An expert's parameter in a state dict, each or grouped, and the key that `torch_dist` has for it."""


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A directory of `.distcp` files: what it is, arguments, and tensors by `torch_dist`'s keys."""

    directory: Path
    format: DistcpFormat
    args: StoredArgs
    tensors: dict[str, GlobalTensor]


def is_distcp(directory: Path) -> bool:
    """Whether it looks like one, complete or not."""
    return any((directory / name).is_file() for name in (METADATA, CONFIG)) or any(directory.glob("*.distcp"))


def read_saved(directory: Path) -> SavedModel:
    """Opens one iteration's directory: which format it has, arguments, and the places of its tensors.

    Raises: ValueError when a file is missing, damaged, or names a class that is not allowed, or when the directory
    holds something else than a model of Megatron's.
    """
    if (directory / CONFIG).is_file():
        _check_config(directory / CONFIG)
        state = read_metadata(directory)
        args = _common_args(directory, state)
        tensors = {key: tensor for key, tensor in state.tensors.items() if not key.startswith(_OPTIMIZER)}
        named = _without_prefix(f"{directory}", tensors)
        return SavedModel(directory=directory, format="torch_dist", args=args, tensors=named)
    return _read_dcp(directory, read_metadata(directory))


def _read_dcp(directory: Path, state: SavedState) -> SavedModel:
    """A flattened state dict of torch.distributed.checkpoint: `model.` and names of parameters, `args`, others."""
    model = {key: tensor for key, tensor in state.tensors.items() if _MODEL.match(key)}
    if not any(key.endswith(EMBEDDING) for key in model):
        raise _of_no_model(directory, state.tensors)
    args, blob = StoredArgs(), state.objects.get("args")
    if blob is not None:
        saved = read_torch_file(blob.path, offset=blob.offset, length=blob.length, foreign=True)
        args = stored_args({"args": saved}, f"{blob.path}: its object args")
    wrapped = any(key.startswith("model.module.") for key in model)
    is_megatron_fsdp = wrapped or args.values.get("ckpt_format") == "fsdp_dtensor"
    format: DistcpFormat = "fsdp_dtensor" if is_megatron_fsdp else "torch_dcp"
    where = f"{directory}, of the format {format},"
    if stages := {key.partition(".")[0] for key in model} - {"model"}:
        raise ValueError(
            f"{where} holds virtual pipeline stages ({', '.join(sorted(stages))}), whose layers count from 0 in each: "
            "it does not say which layers they are; save it with --ckpt-format torch_dist"
        )
    parameters = {key: tensor for key, tensor in model.items() if not key.endswith(NO_PARAMETERS)}
    named = {_expert_key(key): tensor for key, tensor in _without_prefix(where, parameters).items()}
    return SavedModel(directory=directory, format=format, args=args, tensors=named)


def _check_config(path: Path) -> None:
    """Raises: ValueError unless `metadata.json`, which Megatron writes last, names the torch_dist format."""
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); copy it again from its source") from error
    backend = config.get("sharded_backend") if isinstance(config, dict) else config
    if backend != "torch_dist":
        raise ValueError(
            f"{path} names the backend {backend!r}, expected 'torch_dist'; read the checkpoint with Megatron and "
            "save it with --ckpt-format torch_dist"
        )


def _common_args(directory: Path, state: SavedState) -> StoredArgs:
    """The arguments in `common.pt`, or since Megatron-Core 0.19 in the object `common_state`, a list of that dict."""
    path, blob = directory / COMMON, state.objects.get(COMMON_STATE)
    if path.is_file():
        return stored_args(read_torch_file(path, foreign=True), path)
    if blob is None:
        raise ValueError(
            f"{directory} is a torch_dist checkpoint without its common state: it has neither {COMMON} nor the object "
            f"{COMMON_STATE} in the .distcp files, where Megatron-Core keeps the arguments since 0.19; copy {COMMON} "
            "from where the checkpoint was saved"
        )
    saved = read_torch_file(blob.path, offset=blob.offset, length=blob.length, foreign=True)
    where = f"{blob.path}: its object {COMMON_STATE}"
    return stored_args(saved[0] if isinstance(saved, list) and len(saved) == 1 else saved, where)


def _without_prefix(where: str, tensors: Mapping[str, GlobalTensor]) -> dict[str, GlobalTensor]:
    """The tensors without what a wrapper puts ahead of the model's names: NeMo 2 and FSDP `module.`.

    Raises: ValueError when there is no embedding under any such prefix, or under several.
    """
    prefixes = {match[1] for key in tensors if (match := _FIRST.fullmatch(key))}
    if len(prefixes) == 1:
        (prefix,) = prefixes
        return {
            key.removeprefix(prefix) if key.startswith(prefix) else f"{key} (without {prefix!r})": tensor
            for key, tensor in tensors.items()
        }
    if prefixes:
        raise ValueError(
            f"{where} has several {EMBEDDING}: below {', '.join(map(repr, sorted(prefixes)))}; give the checkpoint of "
            "one GPTModel"
        )
    if any(is_adapter_tensor(name) for name in tensors):
        raise ValueError(
            f"{where} has no {EMBEDDING} among its {len(tensors)} tensors; it is the resume point of an adapter, "
            "without the model that the adapter is on: give what the run has exported (checkpoints/latest)"
        )
    raise ValueError(
        f"{where} has no {EMBEDDING} among its {len(tensors)} tensors ({_some(tensors)}); give the checkpoint of a "
        "GPTModel"
    )


def _expert_key(name: str) -> str:
    for pattern, key in _EXPERTS:
        name = pattern.sub(key, name)
    return name


def _of_no_model(directory: Path, tensors: Iterable[str]) -> ValueError:
    """The error for a directory without `metadata.json` and without tensors below `model.`."""
    names = list(tensors)
    if any(_FIRST.fullmatch(name) for name in names):
        return ValueError(
            f"{directory / CONFIG} does not exist, which Megatron-Core writes last into a torch_dist checkpoint: the "
            "save was not finished, or the file was not copied along; take another iteration, or copy the file"
        )
    return ValueError(
        f"{directory} is a checkpoint of torch.distributed.checkpoint ({METADATA} and .distcp files), but of no model "
        f"of Megatron's: its {len(names)} tensors are named {_some(names)}; let the program that saved it write a "
        "Hugging Face directory, and give that"
    )


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
