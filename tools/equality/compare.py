"""What a run has given, and every difference between two of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Row = dict[str, str]
"""Metrics of a step by name, each as the file writes it: two numbers are equal when their texts are."""

METRICS_RENAMED: dict[str, str] = {}
"""New name: old name. For example `{"actor_entropy": "entropy"}`. Both versions' rows are compared by new names."""
READS = 1
"""What `read_numbers` takes from a run directory: raised when that changes, so that no kept numbers are compared."""
LEFT_OUT = frozenset({"seconds", "second", "clock", "gib", "mib", "idle", "rebuilds"})
"""Words of names of metrics that are not compared: times, rates, memory, and what was done again without a trace."""
TABLES = ("*.jsonl", "samples/*.jsonl")
"""Files of a run directory, beside `metrics.jsonl`, that say something about samples."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """All that two equal runs agree in."""

    rows: dict[str, Row]
    """Compared metrics, by step."""
    digests: dict[str, str]
    """SHA-256 of exported weights and of tables of samples, by path in the run directory; of the links `latest` and
    `best` what they lead to."""
    left_out: list[str]
    """Names of the metrics that are not compared."""


def is_compared(name: str) -> bool:
    """Whether a metric is the same in every equal run, by its name: `eval_loss` is, `seconds_train` is not."""
    return LEFT_OUT.isdisjoint(re.split(r"[_/:]", name))


def read_numbers(run: Path) -> Numbers:
    """What stands in a run directory."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    every = [parse_row(line) for line in text.splitlines()]
    rows: dict[str, Row] = {}
    for number, row in enumerate(every):
        step = row.get("step", f"line {number + 1}")
        if step in rows:
            raise ValueError(f"{run / 'metrics.jsonl'} has step {step} twice")
        rows[step] = {name: value for name, value in row.items() if is_compared(name)}
    paths = [path for pattern in TABLES for path in run.glob(pattern) if path.name != "metrics.jsonl"]
    paths += (run / "checkpoints").rglob("*.safetensors")
    digests = {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}
    links = sorted(path for path in (run / "checkpoints").glob("*") if path.is_symlink())
    digests |= {str(path.relative_to(run)): str(path.readlink()) for path in links}
    left_out = sorted({name for row in every for name in row if not is_compared(name)})
    return Numbers(rows=rows, digests=digests, left_out=left_out)


class _Number(str):
    """A number's text."""


def parse_row(line: str) -> Row:
    """A line of metrics, its numbers as they are written."""
    values: dict[str, Any] = json.loads(line, parse_float=_Number, parse_int=_Number, parse_constant=_Number)
    return {name: str(value) if isinstance(value, _Number) else json.dumps(value) for name, value in values.items()}


def with_new_names(numbers: Numbers, renamed: Mapping[str, str]) -> Numbers:
    """The same with the new name of each metric that has an old one of `renamed`."""
    new_names = {old: new for new, old in renamed.items()}
    rows = {
        step: {new_names.get(name, name): value for name, value in row.items()} for step, row in numbers.rows.items()
    }
    return replace(numbers, rows=rows)


def differences(old: Numbers, new: Numbers) -> Iterator[str]:
    """Every difference, in words: step, metric and both values, or a file and both digests."""
    for step in [*old.rows, *(step for step in new.rows if step not in old.rows)]:
        if step not in old.rows or step not in new.rows:
            yield f"step {step}: {'only in NEW' if step in new.rows else 'missing in NEW'}"
            continue
        yield from unequal(f"step {step}: ", old.rows[step], new.rows[step])
    yield from unequal("", old.digests, new.digests)


def unequal(where: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """The keys with different values, in order."""
    for name in sorted({*old, *new}):
        mine, other = old.get(name, "missing"), new.get(name, "missing")
        if mine != other:
            yield f"{where}{name}: OLD {mine}, NEW {other}"


def emptiness(numbers: Numbers, *, last_step: int | None, shows: Mapping[str, float]) -> Iterator[str]:
    """Reasons, in words, for which equality of these numbers would prove little.

    Args:
        last_step: the step of the last row, for a run that trains; it has exported weights too.
        shows: metrics, each with a number that it has to exceed in some step.
    """
    values = {value for row in numbers.rows.values() for value in row.values()}
    if (count := len([value for value in values if is_fraction(value)])) < 2:
        yield f"only {count} different numbers with a fractional part are compared"
    if last_step is not None:
        reached = list(numbers.rows)[-1] if numbers.rows else "none"
        if reached != str(last_step):
            yield f"the last row is of step {reached}, expected {last_step}"
        trained = [row for step, row in numbers.rows.items() if step != "0"]
        if short := [row["step"] for row in trained if len(row) < 6]:
            yield f"fewer than 6 metrics are compared in steps {', '.join(short)}"
        if not any(name.endswith(".safetensors") for name in numbers.digests):
            yield "no weights were exported"
    for name, bound in shows.items():
        shown = [row[name] for row in numbers.rows.values() if name in row]
        if not any(value != "null" and float(value) > bound for value in shown):
            yield f"{name} is nowhere above {bound:g}: {', '.join(shown) or 'it is missing'}"


def is_fraction(value: str) -> bool:
    """Whether a metric's text is a number that is not whole."""
    try:
        return not float(value).is_integer()
    except (ValueError, OverflowError):
        return False
