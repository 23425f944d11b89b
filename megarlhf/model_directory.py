"""Directory with a model's config.json and tokenizer, and the tokens that end its responses."""

from __future__ import annotations

import json
import logging
import os
import re
from os import PathLike
from pathlib import Path

log = logging.getLogger(__name__)

_ITERATION = re.compile(r"iter_\d+|release")

COMPANION = "hf"
"""Folder for config.json, tokenizer and other small files in a Megatron checkpoint that megarlhf writes."""

GGUF_COMMAND = "python -m tools.gguf_to_hf"
"""Command that converts GGUF files; it is in the repository and not in the installed package."""


TRACKER = "latest_checkpointed_iteration.txt"
"""File in a run's root that says which checkpoint is the latest; Megatron-LM's and verl's."""

_PARTS = (
    ("model/dist_ckpt", "dist_ckpt"),  # verl: Megatron's shards, today's place and the older one
    ("weights",),  # NeMo 2, beside context/
    ("model/huggingface", "huggingface"),  # verl: the whole model
    ("actor", "critic"),  # verl: roles of one step
)
"""Folders in which other programs put a model's weights, those to be preferred first."""
_WEIGHTS = (".metadata", "*.distcp", "mp_rank_*", "*.safetensors", "pytorch_model*.bin")


_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def from_hub(path: str | PathLike[str], *, weights: bool = True) -> Path:
    """Directory of the model at `path`: itself where it exists or cannot be a name of the Hugging Face hub, else the
    hub's model of that name (`org/name`, or `org/name@revision`), downloaded once. `weights`: not only its small files

    Raises: ValueError where the hub has no such model, or cannot be asked.
    """
    path = Path(path)
    match = _HUB_NAME.fullmatch(str(path))
    if path.exists() or match is None:
        return path
    from huggingface_hub import constants, snapshot_download

    name, revision = match["name"], match["revision"]
    try:
        directory = Path(snapshot_download(name, revision=revision, allow_patterns=list(_SMALL_FILES)))
        for kind in ("model*.safetensors", "pytorch_model*.bin") if weights else ():
            snapshot_download(name, revision=directory.name, allow_patterns=[kind])
            if any(directory.glob(kind)):
                break
    except Exception as error:  # network, name, revision, permission: one message for all
        asked = "was looked for among the models downloaded from the Hugging Face hub (HF_HUB_OFFLINE is set)"
        if not constants.HF_HUB_OFFLINE:
            asked = "was looked for on the Hugging Face hub"
        raise ValueError(
            f"{path} does not exist (working directory: {Path.cwd()}), and {asked}: {type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}. Correct the path or the name; a model with conditions needs "
            f"HF_TOKEN; where there is no network, run `hf download {name}` on a machine with one that shares "
            f"HF_HOME = {os.environ.get('HF_HOME', '~/.cache/huggingface')}, or give a directory"
        ) from error
    log.warning("%s is no directory here: the Hugging Face hub's model of this name is taken (%s)", path, directory)
    return directory


def find_part(path: str | PathLike[str]) -> Path:
    """Folder of a run's tree that holds the weights; `path` itself where it holds them, or is no such tree.

    Raises: ValueError when there are several.
    """
    path = Path(path)
    parts = find_parts(path)
    if len(parts) > 1:
        raise ValueError(f"{path} holds several models: {', '.join(map(str, parts))}; name one of them")
    return parts[0] if parts else path


def find_parts(path: Path) -> list[Path]:
    """Folders of a run's tree that hold the weights of a model each; `path` alone where it holds them itself."""
    if not path.is_dir() or any(any(path.glob(name)) for name in _WEIGHTS):
        return [path] if path.is_dir() else []
    if (path / TRACKER).is_file():
        step = path / f"global_step_{(path / TRACKER).read_text(encoding='ascii', errors='replace').strip()}"
        return find_parts(step) if step.is_dir() else [path]  # Megatron-LM's root is read as it is
    for names in _PARTS:
        if parts := [part for name in names for part in find_parts(path / name)]:
            return parts
    return []


def find_hf_directory(path: str | PathLike[str], hf: str | PathLike[str] | None = None) -> Path | None:
    """Directory with the config.json of the model at `path`; None if there is none.

    It is `hf` if given, `path` itself (a Hugging Face directory), or the companion folder of a Megatron checkpoint,
    where `path` may be the checkpoint, one of its iterations, or a tree that `find_part` knows.

    Raises: ValueError if a path does not exist, `hf` has no config.json, or `hf` would replace the config.json and
    tokenizer of a Hugging Face directory.
    """
    for given in (path,) if hf is None else (path, hf):
        if not Path(given).exists():
            hub = f", or download it: hf download {given}" if _HUB_NAME.fullmatch(str(given)) else ""
            raise ValueError(f"{given} does not exist (working directory: {Path.cwd()}); correct the path{hub}")
    path = find_part(path)
    if hf is not None:
        if (path / "config.json").is_file() and not path.samefile(hf):
            raise ValueError(
                f"{path} has a config.json of its own, and {hf} would replace it and the tokenizer; leave model.hf "
                "out: it is for Megatron checkpoints, which have neither"
            )
        if not (Path(hf) / "config.json").is_file():
            raise ValueError(f"{hf} has no config.json; name a Hugging Face directory that describes {path}")
        return Path(hf)
    folders = [path, path / COMPANION]
    if path.name == "dist_ckpt":
        folders.append(path.parent / "huggingface")
    if _ITERATION.fullmatch(path.absolute().name):  # beside other folders, `hf` may be anything
        folders.append(path.absolute().parent / COMPANION)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def require_hf_directory(path: str | PathLike[str], hf: str | PathLike[str] | None = None) -> Path:
    """Directory of `find_hf_directory`. Raises: ValueError if there is none."""
    directory = find_hf_directory(path, hf)
    if directory is not None:
        return directory
    refuse_gguf(path)
    if (Path(path) / "adapter_config.json").is_file():
        raise ValueError(
            f"{path} is a PEFT adapter and no model: give the model that it is on as model.path, and it as lora.path"
        )
    raise ValueError(
        f"{path} has no config.json; give a Hugging Face directory, a Megatron checkpoint made by the converter or in "
        "a resume point, or, for any other Megatron checkpoint, set model.hf to a directory with config.json and "
        "tokenizer"
    )


def refuse_gguf(path: str | PathLike[str]) -> None:
    """Raises: ValueError for a GGUF file, or a directory that has one."""
    path = Path(path)
    gguf_files = [path] if path.is_file() and path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if gguf_files:
        raise ValueError(
            f"{path} {'is' if gguf_files == [path] else 'has'} a GGUF file, which is converted first, in a clone "
            f"of megarlhf: {GGUF_COMMAND} --gguf {gguf_files[0]} --out DIR; then give that directory"
        )


def end_tokens(directory: str | PathLike[str], tokenizer_eos_id: int) -> tuple[int, ...]:
    """Token ids that end a response of the model in a Hugging Face directory, the same as in transformers.

    They are the tokenizer's end-of-sequence token and `eos_token_id` (a number or a list) of generation_config.json, or
    of config.json if there is no such file.

    Raises: ValueError if the file cannot be read, or has something else than numbers.
    """
    files = (Path(directory) / name for name in ("generation_config.json", "config.json"))
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        return (tokenizer_eos_id,)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy the file again from its source") from error
    ids = config.get("eos_token_id") if isinstance(config, dict) else config
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not (isinstance(config, dict) and all(type(token) is int for token in ids)):
        raise ValueError(f"{path}: expected eos_token_id as a token id or a list of them, got {ids}; correct the file")
    return tuple(dict.fromkeys([tokenizer_eos_id, *ids]))
