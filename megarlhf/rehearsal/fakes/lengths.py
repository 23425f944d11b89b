"""Lengths of prompts and responses in a rehearsal: a distribution, a file, or the lengths of an earlier run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megarlhf.observe.records.step_records import LENGTHS_FILE

FORMS = "constant:N, uniform:LOW,HIGH, lognormal:mean=M,sigma=S, a file of numbers, or the directory of an earlier run"


class Lengths(Protocol):
    """A source of numbers of tokens, or of turns."""

    def draw(self, seed: int) -> int:
        """One length. The same seed gives the same length."""
        ...

    def describe(self, unit: str = "tokens") -> str:
        """Description for the page. unit: what is counted"""
        ...


@dataclass(frozen=True)
class Constant:
    value: int

    def draw(self, seed: int) -> int:
        return self.value

    def describe(self, unit: str = "tokens") -> str:
        return f"always {self.value} {unit}"


@dataclass(frozen=True)
class Uniform:
    low: int
    high: int

    def draw(self, seed: int) -> int:
        return random.Random(seed).randint(self.low, self.high)

    def describe(self, unit: str = "tokens") -> str:
        return f"uniform between {self.low} and {self.high} {unit}"


@dataclass(frozen=True)
class LogNormal:
    """Lognormal lengths: `mean` is the distribution's mean, `sigma` the deviation of the logarithm."""

    mean: float
    sigma: float

    def draw(self, seed: int) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(random.Random(seed).lognormvariate(mu, self.sigma)))

    def describe(self, unit: str = "tokens") -> str:
        return f"lognormal with mean {self.mean:g} and sigma {self.sigma:g}"


@dataclass(frozen=True)
class Given:
    """Lengths drawn from observed ones."""

    values: Sequence[int] = field(repr=False)
    source: str = ""

    def draw(self, seed: int) -> int:
        return self.values[random.Random(seed).randrange(len(self.values))]

    def describe(self, unit: str = "tokens") -> str:
        mean = sum(self.values) / len(self.values)
        return f"drawn from {len(self.values)} numbers in {self.source} (mean {mean:.1f} {unit})"


LARGEST_SIGMA = 9.0
"""Largest deviation of the logarithm: four deviations off, a length would be e^36 times another. With more, nearly all
lengths would be 1."""


def parse_lengths(text: str, column: str = "responses") -> Lengths:
    """Lengths from the text of a command-line option. `column`: which lengths of an earlier run.

    Raises: ValueError for a text that is none of `FORMS`.
    """
    kind, _, rest = text.partition(":")
    checked = _not_negative if column == "observed" else _positive
    try:
        if kind == "constant":
            return Constant(checked(int(rest)))
        if kind == "uniform":
            low, high = (checked(int(part)) for part in rest.split(","))
            if low <= high:
                return Uniform(low, high)
        elif kind == "lognormal":
            given = {key: float(value) for key, value in (part.split("=") for part in rest.split(","))}
            finite = all(map(math.isfinite, given.values()))
            if given.keys() == {"mean", "sigma"} and finite and given["mean"] > 0 <= given["sigma"] <= LARGEST_SIGMA:
                return LogNormal(given["mean"], given["sigma"])
        elif Path(text).exists():
            return _from_path(Path(text), column, checked)
    except (ValueError, TypeError) as error:
        raise ValueError(f"lengths {text!r}: {error}; expected {FORMS}") from error
    raise ValueError(f"lengths {text!r}: expected {FORMS}")


def _positive(value: int) -> int:
    if value < 1:
        raise ValueError(f"got {value}, expected 1 or more")
    return value


def _not_negative(value: int) -> int:
    if value < 0:
        raise ValueError(f"got {value}, expected 0 or more")
    return value


def _whole(entry: object) -> int:
    if type(entry) is not int:
        raise ValueError(f"got {entry!r}, expected a whole number")
    return entry


def _from_path(path: Path, column: str, checked: Callable[[int], int]) -> Given:
    file = path / LENGTHS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} has no {LENGTHS_FILE}; name the directory of a run of rl, which writes it")
    values: list[int] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            lengths = _column(entry, column) if isinstance(entry, Mapping) else [entry]
            values += (checked(_whole(length)) for length in lengths)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}, line {number}: {error!r}") from error
    if not values:
        raise ValueError(f"{file} has no lengths")
    return Given(values, str(path))


def _column(entry: Mapping[str, Any], column: str) -> Iterable[object]:
    if column in ("observed", "turns") and column not in entry:
        raise ValueError(f"no {column!r}, which only a run with an environment writes")
    lengths: Iterable[object] = entry[column]
    return lengths
