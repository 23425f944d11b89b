"""What the trials gave: a line each, written as it ends, and their summary by fault."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Result:
    """Of one trial, which has shown that its fault happened."""

    happened: str
    """How that was seen."""
    recovered: bool
    metrics_equal: bool | None = None
    """With the run that nothing happened to, also in weights and TensorBoard; None: nothing was compared."""
    steps_lost: int = 0
    """Optimizer steps that were done again."""
    beyond_promise: int = 0
    """Of these, those that a resume point had which was complete when the fault happened; generated responses that the
    bank had and that were drawn again count as well."""
    problem: str = ""
    """Why it is not recovered, or not equal."""
    seconds: float = 0.0
    fault: str = ""
    number: int = -1
    sources: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


class Record:
    """The trials that were done with the same sources of megarlhf; others are left alone."""

    def __init__(self, file: Path, sources: str) -> None:
        self._file, self._sources = file, sources
        self.results: dict[tuple[str, int], Result] = {}
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            result = Result(**json.loads(line))
            if result.sources == sources:
                self.results[result.fault, result.number] = result

    def add(self, fault: str, number: int, result: Result) -> None:
        """Note a trial."""
        result.fault, result.number, result.sources = fault, number, self._sources
        self.results[fault, number] = result
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, fault: str) -> list[Result]:
        """The trials of a fault, in their order."""
        return [result for (name, _), result in sorted(self.results.items()) if name == fault]


def summary(results: Sequence[Result], recovered: str, promised: str) -> dict[str, Any]:
    """Of the trials of one fault."""
    compared = [result for result in results if result.metrics_equal is not None]
    again = [result.steps_lost for result in results]
    went_on = [result.notes["conversations"] for result in results if "conversations" in result.notes]
    conversations = {"went_on": sum(went_on), "trials": sum(number > 0 for number in went_on)}
    return {
        "trials": len(results),
        "recovered": sum(result.recovered for result in results),
        "metrics_equal": sum(bool(result.metrics_equal) for result in compared) if compared else None,
        "compared": len(compared),
        "steps_lost": {"most": max(again, default=0), "mean": round(statistics.mean(again), 2) if again else 0},
        "beyond_promise": sum(result.beyond_promise for result in results),
        "recovered_means": recovered,
        "promised": promised,
        **({"conversations": conversations} if went_on else {}),
        "problems": [f"{result.number}: {result.problem}" for result in results if result.problem],
    }
