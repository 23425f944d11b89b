"""Where a model's config.json and tokenizer stand: beside its weights, or in a directory named for them."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

COMPANION = "hf"
"""Folder in a Megatron checkpoint that the converter writes: config.json, tokenizer and the other small files."""


def find_description(path: str | PathLike[str], hf: str | PathLike[str] | None = None) -> Path | None:
    """The directory with the config.json of the model at `path`: `hf` if given, the model's own (a Hugging Face
    directory), or the companion folder of a Megatron checkpoint, named whole or by one of its iterations; None
    when there is none."""
    folders = [Path(hf)] if hf is not None else [Path(path), Path(path) / COMPANION, Path(path).parent / COMPANION]
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)
