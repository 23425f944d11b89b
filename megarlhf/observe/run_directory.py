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
_STEPS = ("checkpoints/step_[0-9]*", "checkpoints/.step_[0-9]*.partial")
_FILES = (
    "metrics.jsonl",
    "responses.jsonl",
    ".responses.jsonl.partial",
    "wandb_id",
    "tensorboard/events.out.tfevents.*",
    "checkpoints/latest",
    "checkpoints/.latest.partial",
    "failures/watchdog",
    "failures/step_[0-9]*_*",
    *(f"{step}/{role}" for step in _STEPS for role in ROLES),
    CONFIG_FILE,  # the last to be removed: what is left half-way is still a run's
)
_LINKS = ("latest", ".latest.partial")
_OWN = (
    CONFIG_FILE,
    "metrics.jsonl",
    ".responses.jsonl.partial",
    "wandb_id",
    "wandb",
    "tensorboard",
    "checkpoints",
    "failures",
)
"""What a run keeps to itself in its directory: nothing else may be written there."""


def files_of_a_run(directory: Path) -> list[Path]:
    """What a run has left in `directory`; config.yaml, if any, stands last.

    Behind a link, as of `tensorboard` to a folder that runs share, event files may be another run's: they do not count.
    """
    products = [path for pattern in _FILES for path in sorted(directory.glob(pattern))]
    shared, failures = directory / "tensorboard", directory / "failures"
    if all(path.parent == failures for path in products):
        return []  # a start that the watchdog has ended before it became a run
    return [
        path
        for path in products
        if (path.is_symlink() or path.name not in _LINKS) and not (path.parent == shared and shared.is_symlink())
    ]


def require_usable(cfg: FrozenModel, run: RunConfig, command: str) -> list[Path]:
    """What a start of `command` removes from `run.dir`: nothing, or with `overwrite` the earlier run's files.

    Raises: ValueError when an earlier run is there and may not, or cannot safely, be overwritten, or when something
    that no run wrote stands where this one saves.
    """
    wanted = run.dir.absolute()
    nearest = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not nearest.is_dir():
        which = "is a file" if nearest == wanted else f"lies below {nearest}, which is a file"
        raise ValueError(f"run.dir = {run.dir} {which}; name a directory")
    files = files_of_a_run(run.dir)
    if files:
        _require_overwritable(cfg, run, command, files)
    _require_room(run.dir)
    return files


def _require_overwritable(cfg: FrozenModel, run: RunConfig, command: str, files: list[Path]) -> None:
    """Raises ValueError unless the earlier run's `files` may be removed, by the configuration and without harm."""
    shown = ", ".join(sorted({path.relative_to(run.dir).parts[0] for path in files}))
    if run.on_existing == "refuse":
        raise ValueError(
            f"run.dir = {run.dir} holds an earlier run ({shown}), and the two would be mixed; name another directory, "
            "or start over with run.on_existing=overwrite, which removes these files of that run and nothing else"
        )
    writer = written_by(run.dir / CONFIG_FILE)
    if writer != command:
        whose = f"of `megarlhf {writer}`" if writer else f"that cannot be told: its {CONFIG_FILE} is none of megarlhf's"
        raise ValueError(
            f"run.on_existing = overwrite: run.dir = {run.dir} holds {shown} of a run {whose}; only an earlier run "
            f"of `megarlhf {command}` is overwritten. Name another directory, or remove what is there yourself"
        )
    removed = [place for path in files for place in _places(path)]
    for key, path in _inputs(cfg.model_dump()):
        source = path.resolve()
        if any(source.is_relative_to(gone) for gone in removed):
            raise ValueError(
                f"run.on_existing = overwrite would remove {key} = {path}, which this run reads; name another run.dir"
            )
        lost = [str(gone) for gone in removed if gone.is_relative_to(source)]
        if lost and source.is_dir() and (key.startswith("data.") or _holds_weights(source)):
            raise ValueError(
                f"run.on_existing = overwrite would remove {', '.join(lost[:5])} from {key} = {path}, which this run "
                "reads; name another run.dir"
            )


def _places(path: Path) -> tuple[Path, Path]:
    """Where the name stands, and where it leads if it is a link."""
    return path.parent.resolve() / path.name, path.resolve()


def _holds_weights(directory: Path) -> bool:
    return any(path.suffix in (".safetensors", ".bin") for path in directory.iterdir())


def _require_room(directory: Path) -> None:
    """Raises ValueError where something stands that no run wrote, and that a checkpoint or events would replace."""
    folders = [directory / name for name in ("checkpoints", "tensorboard")]
    strangers = [path for path in folders if not path.is_dir() and (path.exists() or path.is_symlink())]
    links = [directory / "checkpoints" / name for name in _LINKS]
    strangers += [path for path in links if path.exists() and not path.is_symlink()]
    for step in (path for pattern in _STEPS for path in sorted(directory.glob(pattern))):
        whole = step.is_symlink() or not step.is_dir()
        strangers += [step] if whole else sorted(path for path in step.iterdir() if path.name not in ROLES)
    if strangers:
        raise ValueError(
            f"run.dir = {directory} holds {', '.join(map(str, strangers[:5]))}, which no run wrote, where this run "
            "would write; move it away, or name another run.dir"
        )


def require_writable_output(cfg: FrozenModel, run: RunConfig, out: Path) -> None:
    """Raises ValueError unless the responses can go to the file `out` and replace nothing but earlier responses."""
    if out.is_dir() or any(run.dir.resolve().is_relative_to(place) for place in _places(out)):
        raise ValueError(f"out = {out} is a directory; name a file, such as {out / 'responses.jsonl'}")
    for key, path in _inputs(cfg.model_dump()):
        source = path.resolve()
        if any(place.is_relative_to(source) for place in _places(out)):
            place = "is" if out.resolve() == source else "lies below"
            raise ValueError(f"out = {out} {place} {key} = {path}, which this run reads; name another file")
    for name in _OWN:
        if any(place.is_relative_to((run.dir / name).resolve()) for place in _places(out)):
            raise ValueError(
                f"out = {out} is {run.dir / name} or lies below it, which the run itself writes; name another file"
            )
    if out.exists() and run.on_existing == "refuse":
        raise ValueError(f"out = {out} is there; name another file, or replace it with run.on_existing=overwrite")


def written_by(config: Path) -> str | None:
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
        place = run.dir / folder
        if folder.parts and not place.is_symlink() and not any(place.iterdir()):
            place.rmdir()
    try:
        run.dir.mkdir(parents=True, exist_ok=True)
        with (run.dir / CONFIG_FILE).open("x", encoding="utf-8") as file:  # of two starts at once, one gets it
            file.write(_HEADER.format(command=command) + dump_config(cfg))
    except FileExistsError as error:
        raise ValueError(f"run.dir = {run.dir}: another run has just started there; name another directory") from error
    except OSError as error:
        raise ValueError(f"run.dir = {run.dir} cannot be written ({error}); name a directory you may write") from error
