"""Tasks that the package reasoning-gym generates, as a data source: `reasoning_gym:TASK?size=500&seed=0`.

Some of its generators walk through Python sets, so that what they make depends on the process's hash seed. Items are
therefore made in a process of its own with a fixed one, and are equal on every rank, in every run.

The standard library and yaml only: the process that generates and those that score import this. Run as
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
"""The record's column from which the rule `reasoning_gym` makes the item again."""
SAME_HASHES = {"PYTHONHASHSEED": "0"}
"""Environment of each process that generates items or makes them again."""


@dataclass(frozen=True)
class Procedural:
    """What a source's name says."""

    task: str
    params: Mapping[str, Any]
    """Arguments of the task's configuration, with `size` and `seed`."""

    def seeds(self) -> range:
        """Item n of a task is drawn with seed + n."""
        return range(self.params["seed"], self.params["seed"] + self.params["size"])

    def other_params(self) -> dict[str, Any]:
        """What makes items of another kind."""
        return {key: value for key, value in self.params.items() if key not in ("size", "seed")}


def is_procedural(name: str | Path) -> bool:
    """Whether a source is none on disk, and none of the hub."""
    return str(name).startswith(PREFIX)


def parse(name: str) -> Procedural:
    """From `reasoning_gym:TASK?size=500&seed=0&PARAM=VALUE`, values in YAML.

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
    """The source, after a look whether reasoning-gym knows its task and its parameters. Nothing is generated.

    Raises: ValueError, naming the nearest name there is.
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
    """How many items there are. Raises: ValueError as `parse`."""
    return int(parse(name).params["size"])


def generate(name: str) -> list[dict[str, Any]]:
    """The items, as rows with `prompt`, `answer` (where the task has one answer only) and what the rule
    `reasoning_gym` needs. Raises: ValueError as `require_task`, or with what the generator said."""
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
    """The dataset of an item and the item itself, from the record's column. Raises: ValueError where it is another
    item than that of the data, as with another version of reasoning-gym."""
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
def _item(name: str, number: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _dataset_of(name)[number]
    return found


def _digest(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()[:16]


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(known))}"


def _print_items(name: str) -> None:
    for number in range(parse(name).params["size"]):
        with contextlib.redirect_stdout(sys.stderr):  # of what a generator prints
            item = _item(name, number)
        row = {"question": item["question"]}
        if isinstance(item["answer"], str):
            row["answer"] = item["answer"]
        row[FIELD] = {"source": name, "item": number, "digest": _digest(item["question"])}
        print(json.dumps(row, ensure_ascii=True))


if __name__ == "__main__":
    _print_items(sys.argv[1])
