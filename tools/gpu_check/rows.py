"""The table: what was found, what was allowed, and whether it passed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from megarlhf.observe.terminal.progress import make_console, table

Status = Literal["passed", "FAILED", "skipped"]
STYLES: dict[Status, str] = {"passed": "green", "FAILED": "bold red", "skipped": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure."""

    check: str
    case: str
    status: Status
    figure: str = ""
    measured: float | None = None
    limit: float | None = None
    note: str = ""


def judged(check: str, case: str, figure: str, measured: float, limit: float, note: str = "") -> Row:
    """Passed where `measured` is at most `limit`, which NaN is not."""
    status: Status = "passed" if measured <= limit else "FAILED"
    return Row(check=check, case=case, figure=figure, measured=measured, limit=limit, status=status, note=note)


def failed(check: str, case: str, note: str) -> Row:
    """What could not be measured."""
    return Row(check=check, case=case, status="FAILED", note=note)


def show(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print the table and what it comes to."""
    console = console or make_console()
    cells = [
        (
            row.check,
            row.case,
            row.figure,
            _number(row.measured),
            _number(row.limit),
            Text(row.status, style=STYLES[row.status]),
            row.note,
        )
        for row in rows
    ]
    console.print(table("make test-gpu", cells, ("check", "case", "figure", "measured", "limit", "", "")))
    counts = Counter(row.status for row in rows)
    console.print(", ".join(f"{counts[status]} {status}" for status in STYLES))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def exit_status(rows: Sequence[Row]) -> int:
    """0 only where something passed and nothing failed."""
    statuses = {row.status for row in rows}
    return 0 if "passed" in statuses and "FAILED" not in statuses else 1


def write(path: Path, about: dict[str, Any], rows: Sequence[Row]) -> None:
    """All of it as JSON, at once."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    partial.replace(path)
