"""The run directory: what a run writes there, and what a new run may do where an earlier one has been.

Whether a file is a run's own is told by its name, and only beside a `config.yaml` that megarlhf wrote. Everything
else in the directory is the user's, and stays.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarlhf.config import FrozenModel, RunConfig, dump_config

CONFIG_FILE = "config.yaml"
_HEADER = "# megarlhf {command}: the resolved configuration of this run\n"
_WRITTEN_BY = re.compile(r"# megarlhf (\w+): the resolved configuration")

ROLES = ("actor", "critic", "reward_model")
"""Folders of a checkpoint: what a run exports."""
_FILES = (
    "metrics.jsonl",
    "responses.jsonl",
    ".responses.jsonl.partial",
    "wandb_id",
    "tensorboard/events.out.tfevents.*",
    "checkpoints/latest",
    "checkpoints/.latest.partial",
    *(f"checkpoints/{step}/{role}" for step in ("step_[0-9]*", ".step_[0-9]*.partial") for role in ROLES),
    CONFIG_FILE,  # the last to be removed: what is left half-way is still a run's
)


def files_of_a_run(directory: Path) -> list[Path]:
    """What a run has left in `directory`; config.yaml, if any, stands last."""
    products = [path for pattern in _FILES for path in sorted(directory.glob(pattern))]
    return [path for path in products if path.name != "latest" or path.is_symlink()]


def require_usable(cfg: FrozenModel, run: RunConfig, command: str) -> list[Path]:
    """What a start of `command` removes from `run.dir`: nothing, or with `overwrite` the earlier run's files.

    Raises: ValueError when an earlier run is there and may not, or cannot safely, be overwritten.
    """
    if run.dir.exists() and not run.dir.is_dir():
        raise ValueError(f"run.dir = {run.dir} is a file; name a directory")
    files = files_of_a_run(run.dir)
    if not files:
        return []
    shown = ", ".join(sorted({path.relative_to(run.dir).parts[0] for path in files}))
    if run.on_existing == "refuse":
        raise ValueError(
            f"run.dir = {run.dir} holds an earlier run ({shown}), and the two would be mixed; name another directory, "
            "or start over with run.on_existing=overwrite, which removes these files of that run and nothing else"
        )
    _require_removable(cfg, run.dir, command, files, shown)
    return files


def _require_removable(cfg: FrozenModel, directory: Path, command: str, files: list[Path], shown: str) -> None:
    """Raises ValueError where removing `files` might take away something that is not the earlier run's."""
    writer = _written_by(directory / CONFIG_FILE)
    if writer != command:
        whose = f"of `megarlhf {writer}`" if writer else f"that cannot be told: its {CONFIG_FILE} is none of megarlhf's"
        raise ValueError(
            f"run.on_existing = overwrite: run.dir = {directory} holds {shown} of a run {whose}; only an earlier run "
            f"of `megarlhf {command}` is overwritten. Name another directory, or remove what is there yourself"
        )
    if strangers := [str(p) for step in directory.glob("checkpoints/step_*") for p in _others_in(step)]:
        raise ValueError(
            f"run.on_existing = overwrite would remove {', '.join(strangers[:5])}, which no run wrote; move it away"
        )
    removed = [path.resolve() for path in files]
    for key, path in _inputs(cfg.model_dump()):
        if any(path.expanduser().resolve().is_relative_to(gone) for gone in removed):
            raise ValueError(
                f"run.on_existing = overwrite would remove {key} = {path}, which this run reads; name another run.dir"
            )


def _others_in(step: Path) -> list[Path]:
    """What stands in a step's folder beside the exported roles."""
    return sorted(path for path in step.iterdir() if path.name not in ROLES) if step.is_dir() else []


def _written_by(config: Path) -> str | None:
    """The command whose resolved configuration the file is; None for any other file."""
    if not config.is_file():
        return None
    with config.open(encoding="utf-8", errors="replace") as file:
        match = _WRITTEN_BY.match(file.readline())
    return match[1] if match else None


def _inputs(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Every path in a configuration by its key, but for those that are written."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _inputs(value, f"{prefix}{name}.")
        elif isinstance(value, Path) and prefix + name not in ("run.dir", "out"):
            yield prefix + name, value


def claim(cfg: FrozenModel, run: RunConfig, command: str) -> None:
    """Make the run directory this run's: an earlier run's files go, and the resolved configuration is written.

    Raises: ValueError as `require_usable`, or when the directory cannot be made or another run is faster.
    """
    files = require_usable(cfg, run, command)
    for path in files:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for folder in sorted({parent for path in files for parent in path.relative_to(run.dir).parents}, reverse=True):
        if folder.parts and not any((run.dir / folder).iterdir()):
            (run.dir / folder).rmdir()
    try:
        run.dir.mkdir(parents=True, exist_ok=True)
        with (run.dir / CONFIG_FILE).open("x", encoding="utf-8") as file:  # of two starts at once, one gets it
            file.write(_HEADER.format(command=command) + dump_config(cfg))
    except FileExistsError as error:
        raise ValueError(f"run.dir = {run.dir}: another run has just started there; name another directory") from error
    except OSError as error:
        raise ValueError(f"run.dir = {run.dir} cannot be written ({error}); name a directory you may write") from error
