"""Files that a run writes in its directory. `resume/claim/on_existing.py` decides about a start where a run has been.

A file is the run's own if it has one of these names and is beside a `config.yaml` that megarlhf wrote. All other
files are the user's, and stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarlhf.atomic_write import partial_name
from megarlhf.config import ROLES, FrozenModel, RunConfig
from megarlhf.config.lora import ADAPTER_SUFFIX

CONFIG_FILE = "config.yaml"
CONFIG_HEADER = "# megarlhf {command}: the resolved configuration of this run\n"
FINISHED_FILE = "FINISHED"
_WRITTEN_BY = re.compile(r"# megarlhf (\w+): the resolved configuration")

_RESULTS = (*(name for name, role in ROLES.items() if role.trained_by), "actor_ema")
_EXPORTS = (*_RESULTS, *(f"{role}{ADAPTER_SUFFIX}" for role in _RESULTS))
"""Folders of a checkpoint that a run exports."""
_STEPS = ("checkpoints/step_[0-9]*", "checkpoints/.step_[0-9]*.partial", "checkpoints/.step_[0-9]*.replaced")
_BEING_WRITTEN = tuple(f".{name}.megarlhf-{kind}" for name in _EXPORTS for kind in ("lock", "partial"))
"""Names beside a role's folder while it is written (`weights/checkpoint/staging.py`), and after a kill."""
_WHOLE_FILES = (
    "metrics.jsonl",
    "lengths.jsonl",
    "responses.jsonl",
    "responses_of_against.jsonl",
    "responses_without_rewards.jsonl",
    "calibration.json",
    "eval.json",
    "samples/step_[0-9]*.jsonl",
    "samples/eval_step_[0-9]*.jsonl",
    "profile/step_[0-9]*_rank_[0-9]*",
    "checkpoints/latest",
    "checkpoints/best",
    "config.[0-9]*.yaml",  # earlier configurations of a run that was resumed with another
    FINISHED_FILE,
)
"""Files that `atomic_write` writes."""
_FILES = (
    *(pattern for name in _WHOLE_FILES for pattern in (name, partial_name(name))),
    *("metrics.jsonl.cut", "lengths.jsonl.cut"),  # partial files of earlier versions
    "wandb_id",
    "tensorboard/events.out.tfevents.*",
    *(f"{step}/{name}" for step in _STEPS for name in (*_EXPORTS, *_BEING_WRITTEN)),
    "resume/step_[0-9]*",
    "resume/.step_[0-9]*",
    "bank/*",
    "failures/*",
    partial_name(CONFIG_FILE),
    CONFIG_FILE,  # removed last: a directory that is half removed is still a run's
)
_LINKS = tuple(name for link in ("latest", "best") for name in (link, partial_name(link)))
_FOLDERS = ("checkpoints", "tensorboard", "resume", "bank", "failures", "samples", "profile")
_OWN = (
    *(CONFIG_FILE, FINISHED_FILE, "lock", "metrics.jsonl", "lengths.jsonl"),
    partial_name("responses.jsonl"),
    *("wandb_id", "wandb", *_FOLDERS),
)
"""Names in the run directory where nothing else may be written."""


def files_of_a_run(directory: Path) -> list[Path]:
    """Files that a run has left in `directory`; config.yaml, if any, is last.

    `tensorboard` may be a link to a folder that runs share. Event files there may be another run's and do not count.
    """
    products = [path for pattern in _FILES for path in sorted(directory.glob(pattern))]
    shared, failures = directory / "tensorboard", directory / "failures"
    if all(path.parent == failures for path in products):
        return []  # a start that the watchdog ended before it became a run
    return [
        path
        for path in products
        if (path.is_symlink() or path.name not in _LINKS) and not (path.parent == shared and shared.is_symlink())
    ]


def places(path: Path) -> tuple[Path, Path]:
    """The location of the name, and of the file that it leads to if it is a link."""
    return path.parent.resolve() / path.name, path.resolve()


def require_room(directory: Path, *, best: bool = False) -> None:
    """Refuse a directory with files that no run wrote and that a checkpoint or events would replace.

    best: the run writes the link `checkpoints/best`; otherwise the name is the user's

    Raises: ValueError.
    """
    folders = [directory / name for name in _FOLDERS]
    strangers = [path for path in folders if not path.is_dir() and (path.exists() or path.is_symlink())]
    strangers += [path for path in [directory / "lock"] if path.is_dir()]
    names = [name for name in _LINKS if best or "best" not in name]
    links = [directory / "checkpoints" / name for name in names]
    strangers += [path for path in links if path.exists() and not path.is_symlink()]
    for step in (path for pattern in _STEPS for path in sorted(directory.glob(pattern))):
        if step.is_symlink() or not step.is_dir():
            strangers.append(step)
        else:
            strangers += sorted(path for path in step.iterdir() if path.name not in (*_EXPORTS, *_BEING_WRITTEN))
    if strangers:
        raise ValueError(
            f"run.dir = {directory} holds {', '.join(map(str, strangers[:5]))}, which no run wrote, where this run "
            "would write; move it away, or name another run.dir"
        )


def require_writable_output(cfg: FrozenModel, run: RunConfig, out: Path) -> None:
    """Refuse a file `out` for responses that would replace anything but earlier responses. Raises: ValueError."""
    if out.is_dir() or any(run.dir.resolve().is_relative_to(location) for location in places(out)):
        raise ValueError(f"out = {out} is a directory; name a file, such as {out / 'responses.jsonl'}")
    for key, path in inputs(cfg.model_dump()):
        source = path.resolve()
        if any(location.is_relative_to(source) for location in places(out)):
            relation = "is" if out.resolve() == source else "is below"
            raise ValueError(f"out = {out} {relation} {key} = {path}, which this run reads; name another file")
    for name in _OWN:
        if any(location.is_relative_to((run.dir / name).resolve()) for location in places(out)):
            raise ValueError(
                f"out = {out} is {run.dir / name} or below it, which the run itself writes; name another file"
            )
    if out.exists() and run.on_existing != "overwrite":
        raise ValueError(f"out = {out} exists; name another file, or replace it with run.on_existing=overwrite")


def written_by(config: Path) -> str | None:
    """The command whose resolved configuration the file holds; None for any other file."""
    if not config.is_file():
        return None
    with config.open(encoding="utf-8", errors="replace") as file:
        match = _WRITTEN_BY.match(file.readline())
    return match[1] if match else None


def inputs(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Every path that a configuration reads, with its key."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from inputs(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            for item in value:
                if isinstance(item, Mapping):
                    yield from ((key.removesuffix(".path"), path) for key, path in inputs(item, f"{prefix}{name}."))
        elif isinstance(value, Path) and prefix + name not in ("run.dir", "out"):
            yield prefix + name, value
