"""Where a model's config.json and tokenizer stand: beside its weights, or in a directory named for them."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

_ITERATION = re.compile(r"iter_\d+|release")

COMPANION = "hf"
"""Folder in a Megatron checkpoint that the converter writes: config.json, tokenizer and the other small files."""


def find_hf_directory(path: str | PathLike[str], hf: str | PathLike[str] | None = None) -> Path | None:
    """The directory with the config.json of the model at `path`: `hf` if given, the model's own (a Hugging Face
    directory), or the companion folder of a Megatron checkpoint, named whole or by one of its iterations; None
    when there is none.

    Raises: ValueError when `hf` is given and has no config.json.
    """
    if hf is not None:
        if not (Path(hf) / "config.json").is_file():
            raise ValueError(f"{hf} has no config.json; name a Hugging Face directory that describes {path}")
        return Path(hf)
    path = Path(path)
    folders = [path, path / COMPANION]
    if _ITERATION.fullmatch(path.absolute().name):  # a folder `hf` beside anything else is somebody else's
        folders.append(path.absolute().parent / COMPANION)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def require_hf_directory(path: str | PathLike[str], hf: str | PathLike[str] | None = None) -> Path:
    """`find_hf_directory`. Raises: ValueError when there is none."""
    directory = find_hf_directory(path, hf)
    if directory is None:
        raise ValueError(
            f"{path} has no config.json; give a Hugging Face directory, a Megatron checkpoint made by the "
            "converter, or, for any other Megatron checkpoint, set model.hf to a directory with config.json and "
            "tokenizer"
        )
    return directory
