"""The root of a Megatron run's checkpoints: a tracker file and one directory per iteration."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Literal

from megarlhf.model_directory import TRACKER

RELEASE: Literal["release"] = "release"

Iteration = int | Literal["release"]
"""Iteration of a checkpoint; `release` is one that no training run wrote, a converted one for instance."""

_FOLDER = re.compile(r"iter_(\d{7,})")
_VERL_STEP = re.compile(r"global_step_(\d+)")
"""Folder of one step, with the checkpoint below `actor/dist_ckpt` or `actor/model/dist_ckpt`."""


def checkpoint_directory(root: str | PathLike[str], iteration: Iteration) -> Path:
    """`root/iter_0000123`, or `root/release`."""
    return Path(root) / (RELEASE if iteration == RELEASE else f"iter_{iteration:07d}")


def write_tracker(root: str | PathLike[str], iteration: Iteration) -> None:
    """Says which checkpoint of the root is the latest."""
    (Path(root) / TRACKER).write_text(str(iteration), encoding="ascii")


def read_tracker(root: str | PathLike[str]) -> Iteration:
    """Raises: ValueError when the tracker says neither a number nor `release`."""
    path = Path(root) / TRACKER
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if text != RELEASE and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{path} says {text!r}, expected an iteration or {RELEASE!r}; correct it")
    return RELEASE if text == RELEASE else int(text)


def find_checkpoint(path: str | PathLike[str]) -> tuple[Path | None, Iteration | None]:
    """The directory of a checkpoint and its iteration, from a run's root or from that directory itself.

    (None, None) when `path` is neither. Raises: ValueError when the tracker is damaged, or names a directory that
    is not there.
    """
    path = Path(path)
    if (path / TRACKER).is_file():
        iteration = read_tracker(path)
        directory = checkpoint_directory(path, iteration)
        if not directory.is_dir():
            raise ValueError(
                f"{path / TRACKER} names {directory}, which does not exist; copy it, or name one that does"
            )
        return directory, iteration
    if any(any(path.glob(name)) for name in (".metadata", "*.distcp", "mp_rank_*")):
        names = [folder.name for folder in (path.absolute(), *path.absolute().parents[:3])]
        number = _FOLDER.fullmatch(names[0]) or next(filter(None, map(_VERL_STEP.fullmatch, names)), None)
        return path, int(number[1]) if number else RELEASE if names[0] == RELEASE else None
    return None, None
