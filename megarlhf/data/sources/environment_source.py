"""Prompts of a user's environment as a data source: `environment:mine:Class?size=500&seed=0&PARAM=VALUE`.

The class is made with the PARAMs. Its method `prompts(size, seed)`, which may be static, returns `size` records. A
class without it has gymnasium's `reset`: record n is `{"prompt": observation, "environment_seed": seed + n}`. The rank
that tokenizes the records has them made by a process with a fixed hash seed; other ranks read its samples. A second
process makes them at the same time, and a source whose records depend on the clock, say, is refused.
`python=/path/to/python` names another interpreter, as `environment.python` does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megarlhf.data.sources.procedural import Procedural, parse
from megarlhf.own_code.digest import Source
from megarlhf.own_code.failures import short
from megarlhf.own_code.interpreter import ask_process, require_executable

PREFIX = "environment:"
_MODULE = "megarlhf.data.sources.environment_records"
_FIRST_ROWS = 256
"""Records that are kept for checks before the run."""
_LOOK_SECONDS = 120.0
"""Time limit for importing the user's module."""


def is_environment(name: str | Path) -> bool:
    """Tell whether a source is an environment."""
    return str(name).startswith(PREFIX)


def require_environment(name: str) -> Procedural:
    """Check the name of a source. Nothing is imported. Raises: ValueError."""
    source = parse(name)
    module, _, attribute = source.task.partition(":")
    if not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(
            f"{name}: {source.task!r} is no import path; write {PREFIX}package.module:Class?size=500&seed=0"
        )
    if source.python is not None:
        require_executable(Path(source.python), f"{name}: python")
    return source


def look_at_source(name: str) -> Source:
    """Check that the environment can make prompts. Nothing is made. Raises: ValueError."""
    answer = _ask(name, look=True)
    return Source(answer["file"], answer["digest"])


def generate(name: str) -> list[dict[str, Any]]:
    """Make the records. Raises: ValueError as `look_at_source`, with the environment's error, for another number of
    records, and where they differ when they are made again."""
    with ThreadPoolExecutor(2) as threads:
        first, again = (answer["records"] for answer in threads.map(lambda _: _ask(name, look=False), range(2)))
    for number, (record, other) in enumerate(zip(first, again, strict=True)):
        if record != other:
            key = next(key for key in {**record, **other} if record.get(key) != other.get(key))
            raise ValueError(
                f"{name}: record {number} was another one when the records were made again: {key} = "
                f"{short(record.get(key))} and {short(other.get(key))}; let them depend on size and seed only, as by "
                "random.Random(seed)"
            )
    records: list[dict[str, Any]] = first
    return records


def first_records(name: str) -> tuple[Mapping[str, Any], ...]:
    """The first records, for checks. They are made once for each state of the code. Raises: ValueError as
    `generate`."""
    return _first_records(name, look_at_source(name).digest)


@functools.lru_cache(maxsize=8)
def _first_records(name: str, digest: str) -> tuple[Mapping[str, Any], ...]:
    return tuple(generate(name)[:_FIRST_ROWS])


def _ask(name: str, *, look: bool) -> dict[str, Any]:
    source = require_environment(name)
    drawn = {key: source.params[key] for key in ("size", "seed")}
    request = {"function": source.task, "args": source.other_params(), "look": look, **drawn}
    return ask_process(_MODULE, request, source.python, name, _LOOK_SECONDS if look else None)
