"""Tasks of the package reasoning-gym as a data source: `reasoning_gym:TASK?size=500&seed=0`.

Some of its generators iterate over Python sets, so their items depend on the process's hash seed. Items are therefore
made in a process of its own with a fixed hash seed, and are equal on every rank and in every run.

This module imports only the standard library and yaml: the processes that generate and that score import it. Run as
`python -m megarlhf.data.sources.reasoning_gym SOURCE`, it prints a JSON line for each item.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

PREFIX = "reasoning_gym:"
FIELD = "reasoning_gym"
"""The record's column from which the rule `reasoning_gym` recreates the item."""
SAME_HASHES = {"PYTHONHASHSEED": "0"}
"""Environment of each process that generates or recreates items."""


@dataclass(frozen=True)
class Procedural:
    """The parts of a source's name."""

    task: str
    params: Mapping[str, Any]
    """Arguments of the task's configuration, with `size` and `seed`."""

    def seeds(self) -> range:
        """Seeds of the items: item n of a task is drawn with seed + n."""
        return range(self.params["seed"], self.params["seed"] + self.params["size"])

    def other_params(self) -> dict[str, Any]:
        """Parameters but `size` and `seed`."""
        return {key: value for key, value in self.params.items() if key not in ("size", "seed")}


def is_procedural(name: str | Path) -> bool:
    """Tell whether a source is generated."""
    return str(name).startswith(PREFIX)


def parse(name: str) -> Procedural:
    """Parse `reasoning_gym:TASK?size=500&seed=0&PARAM=VALUE`, with values in YAML.

    Raises: ValueError for another form, and without `size` or `seed`: without a seed each rank would draw its own.
    """
    task, _, query = name.removeprefix(PREFIX).partition("?")
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
                f"{PREFIX}{task or 'TASK'}?size=500&seed=0 (in quotes in a shell), with other seeds for other data"
            )
    return Procedural(task, params)


def require_task(name: str) -> Procedural:
    """Check that reasoning-gym knows the task and its parameters. Nothing is generated.

    Raises: ValueError that names the nearest known name.
    """
    source = parse(name)
    require_reasoning_gym(name)
    from reasoning_gym.factory import DATASETS

    known = [task for task in DATASETS if task != "composite"]
    if source.task not in known:
        raise ValueError(f"{name}: reasoning-gym has no task {source.task!r}{_nearest(source.task, known)}")
    names = [field.name for field in fields(DATASETS[source.task][1])]
    for key in source.params:
        if key not in names:
            raise ValueError(f"{name}: the task has no parameter {key!r}{_nearest(key, names)}")
    try:
        _dataset(source)
    except Exception as error:
        raise ValueError(
            f"{name}: reasoning-gym refuses the parameters: {str(error) or type(error).__name__}"
        ) from error
    return source


def require_reasoning_gym(what: str) -> None:
    """Raises: ValueError where the package is not installed."""
    if find_spec("reasoning_gym") is None:
        raise ValueError(f"{what} needs the package reasoning-gym: pip install 'megarlhf[verifiers]'")


def require_disjoint(train: str | Path, validation: str | Path) -> None:
    """Raises: ValueError where both are the same task with the same parameters, drawn with some of the same seeds."""
    if not (is_procedural(train) and is_procedural(validation)):
        return
    ours, theirs = parse(str(train)), parse(str(validation))
    same = ours.task == theirs.task and ours.other_params() == theirs.other_params()
    both = range(max(ours.seeds().start, theirs.seeds().start), min(ours.seeds().stop, theirs.seeds().stop))
    if same and both:
        raise ValueError(
            f"data.train = {train} and data.validation = {validation} share {len(both)} items: item n is drawn with "
            f"seed + n. Give validation a seed of {ours.seeds().stop} or more"
        )


def items_of(name: str) -> int:
    """Number of items of a source. Raises: ValueError as `parse`."""
    return int(parse(name).params["size"])


def generate(name: str) -> list[dict[str, Any]]:
    """Generate the items: rows with `prompt`, `answer` (if the task has a single answer) and the column for the rule
    `reasoning_gym`. Raises: ValueError as `require_task`, or with the generator's error."""
    require_task(name)
    done = subprocess.run(
        [sys.executable, "-m", "megarlhf.data.sources.reasoning_gym", name],
        env=os.environ | SAME_HASHES,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"{name}: the generator failed: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    rows = []
    for line in done.stdout.splitlines():
        item = json.loads(line)
        rows.append({"prompt": item.pop("question"), **item})
    return rows


def item_again(described: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Recreate an item, with its dataset, from the record's column. Raises: ValueError where it differs from that of
    the data, as with another version of reasoning-gym."""
    source = str(described["source"])
    dataset = _dataset_of(source)
    item = _item(source, int(described["item"]))
    if _digest(item["question"]) != described["digest"]:
        raise ValueError(
            f"item {described['item']} of {source} is another one here than where the data was made; use one version "
            "of reasoning-gym for both"
        )
    return dataset, item


def _dataset(source: Procedural) -> Any:
    from reasoning_gym import create_dataset

    params = {key: tuple(value) if isinstance(value, list) else value for key, value in source.params.items()}
    return create_dataset(source.task, **params)


@functools.lru_cache(maxsize=8)
def _dataset_of(name: str) -> Any:
    return _dataset(parse(name))


@functools.lru_cache(maxsize=256)
def _item(name: str, index: int) -> Mapping[str, Any]:
    item: Mapping[str, Any] = _dataset_of(name)[index]
    return item


def _digest(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()[:16]


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(known))}"


def _print_items(name: str) -> None:
    for index in range(parse(name).params["size"]):
        with contextlib.redirect_stdout(sys.stderr):  # of what a generator prints
            generated = _item(name, index)
        row = {"question": generated["question"]}
        if isinstance(generated["answer"], str):
            row["answer"] = generated["answer"]
        row[FIELD] = {"source": name, "item": index, "digest": _digest(generated["question"])}
        print(json.dumps(row, ensure_ascii=True))


if __name__ == "__main__":
    _print_items(sys.argv[1])
