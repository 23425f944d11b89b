"""Names of generated sources: `KIND:TASK?size=500&seed=0&PARAM=VALUE`.

KIND is `reasoning_gym` (reasoning_gym.py) or `environment` (environment_source.py). Only the standard library and yaml
are imported: the processes that generate and that score load this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_KINDS = ("reasoning_gym", "environment")


@dataclass(frozen=True)
class Procedural:
    """The parts of a source's name."""

    kind: str
    task: str
    """Task of reasoning-gym, or import path of an environment."""
    params: Mapping[str, Any]
    """Arguments of the task's configuration or of the environment, with `size` and `seed`."""
    python: str | None = None
    """Interpreter that runs an environment; None: that of the run."""

    def seeds(self) -> range:
        """Seeds of the items: item n of a task is drawn with seed + n."""
        return range(self.params["seed"], self.params["seed"] + self.params["size"])

    def other_params(self) -> dict[str, Any]:
        """Parameters but `size` and `seed`."""
        return {key: value for key, value in self.params.items() if key not in ("size", "seed")}


def is_procedural(name: str | Path) -> bool:
    """Tell whether a source is generated."""
    return str(name).startswith(tuple(f"{kind}:" for kind in _KINDS))


def parse(name: str | Path) -> Procedural:
    """Parse `KIND:TASK?size=500&seed=0&PARAM=VALUE`, with values in YAML.

    Raises: ValueError for another form, and without `size` or `seed`: without a seed each rank would draw its own.
    """
    head, _, query = str(name).partition("?")
    kind, _, task = head.partition(":")
    params: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key or key in params:
            raise ValueError(f"{name}: got {part!r}, expected each parameter once, as NAME=VALUE with & between them")
        try:
            params[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{name}: {key} = {value!r} is no YAML value") from None
    for key, least in (("size", 1), ("seed", 0)):
        if not isinstance(params.get(key), int) or isinstance(params[key], bool) or params[key] < least:
            raise ValueError(
                f"{name}: {key} = {params.get(key)!r}, expected a whole number, at least {least}; write "
                f"{kind}:{task or 'TASK'}?size=500&seed=0 (in quotes in a shell), with other seeds for other data"
            )
    python = params.pop("python", None) if kind == "environment" else None
    return Procedural(kind, task, params, None if python is None else os.path.expanduser(str(python)))


def require_disjoint(train: str | Path, validation: str | Path) -> None:
    """Raises: ValueError where both are the same task with the same parameters, drawn with some of the same seeds."""
    if not (is_procedural(train) and is_procedural(validation)):
        return
    ours, theirs = parse(train), parse(validation)
    same = (ours.kind, ours.task, ours.other_params()) == (theirs.kind, theirs.task, theirs.other_params())
    both = range(max(ours.seeds().start, theirs.seeds().start), min(ours.seeds().stop, theirs.seeds().stop))
    if same and both:
        raise ValueError(
            f"data.train = {train} and data.validation = {validation} share {len(both)} items: item n is drawn with "
            f"seed + n. Give validation a seed of {ours.seeds().stop} or more"
        )


def items_of(name: str) -> int:
    """Number of items of a source. Raises: ValueError as `parse`."""
    return int(parse(name).params["size"])
