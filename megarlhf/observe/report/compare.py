"""`megarlhf compare`: final figures, differing configuration keys and curves of several runs on one page.

The runs may be of different commands. Shown are the metrics that at least two of them have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megarlhf.observe.report.chart_list import Chart
from megarlhf.observe.report.charts import draw
from megarlhf.observe.report.html_page import check_replaceable, document, fill, write_whole, written_by
from megarlhf.observe.report.recorded_run import RecordedRun, read_runs
from megarlhf.observe.terminal.progress import format_number, make_console, table

COMPARE = "compare"
"""The command, as its pages name it."""
_FIRST = ("test_", "eval_", "reward_mean", "loss")
"""Beginnings of the names of metrics that are shown above the others."""


@dataclass(frozen=True)
class Final:
    """A metric's last value in a run, and its interval where one is known."""

    value: float
    step: int
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        """`0.75 [0.7, 0.79]`, for example."""
        bounds = "" if self.interval is None else f" [{', '.join(map(format_number, self.interval))}]"
        return format_number(self.value) + bounds


def write_comparison(run_dirs: Sequence[Path], out: Path, *, title: str) -> None:
    """Write the page, and print its tables.

    Raises: ValueError for fewer than two runs, for one named twice, for a directory without a run, and for runs
    without a common metric.
    """
    paths = [path.resolve() for path in run_dirs]
    if repeated := [str(run_dir) for run_dir, path in zip(run_dirs, paths, strict=True) if paths.count(path) > 1]:
        raise ValueError(f"{' and '.join(repeated)}: one directory, named {len(repeated)} times; name each run once")
    if len(run_dirs) < 2:
        raise ValueError("one run compares with nothing; name two or more (megarlhf report shows one)")
    check_replaceable(out, written_by(COMPARE), "comparison of megarlhf")
    runs = read_runs(run_dirs)
    names = [run.name for run in runs]
    finals = final_figures(runs, [intervals_of(path) for path in run_dirs])
    if not finals:
        raise ValueError(f"{', '.join(names)} have no metric in common: nothing can be compared")
    differences = differing_keys([run.config for run in runs])
    figures: list[dict[str, Any]] = []
    charts = [Chart(name, (name,)) for name in finals]
    values = {"runs": runs, "names": names, "finals": finals, "differences": differences, "charts": charts}
    body = fill("compare.html", **values, draw=partial(draw, figures))
    write_whole(out, document(title, COMPARE, [body], figures))
    console = make_console()
    console.print(table("final figures", [(name, *row) for name, row in finals.items()], ("metric", *names)))
    if differences:
        console.print(table("configuration", [(key, *row) for key, row in differences.items()], ("key", *names)))


def intervals_of(run_dir: Path) -> dict[str, tuple[float, float]]:
    """Intervals of the run's figures by name, from `eval.json` and `calibration.json`."""
    intervals = {
        name: (figure["low"], figure["high"])
        for name, figure in _read(run_dir / "eval.json").get("figures", {}).items()
        if figure.get("low") is not None and figure.get("high") is not None
    }
    if interval := _read(run_dir / "calibration.json").get("accuracy_interval"):
        intervals["eval_pair_accuracy"] = interval[0], interval[1]
    return intervals


def _read(path: Path) -> Mapping[str, Any]:
    """Raises: ValueError for a damaged file."""
    try:
        tree: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, or evaluate again") from error
    return tree


def final_figures(
    runs: Sequence[RecordedRun], intervals: Sequence[Mapping[str, tuple[float, float]]]
) -> dict[str, list[Final | None]]:
    """The last finite value in each run, of every metric that at least two runs have. None: the run has none."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics() if name != "wall_clock"))
    finals: dict[str, list[Final | None]] = {}
    for name in sorted(names, key=lambda name: (not name.startswith(_FIRST), names.index(name))):
        row: list[Final | None] = []
        for run, known in zip(runs, intervals, strict=True):
            points = run.finite(name)
            row.append(Final(points[-1][1], points[-1][0], known.get(name)) if points else None)
        if len(row) - row.count(None) >= 2:
            finals[name] = row
    return finals


def differing_keys(configs: Sequence[str | None]) -> dict[str, list[str]]:
    """Values of each configuration key that differs between runs; a dash where a run has no such key.

    Runs of different commands have different keys. For them a key counts only if two runs have it with different
    values.
    """
    flat = [{} if text is None else _flat(yaml.safe_load(text) or {}) for text in configs]
    keys = dict.fromkeys(key for tree in flat for key in tree if key != "run.dir")
    commands = {text.partition("\n")[0] for text in configs if text is not None and text.startswith("#")}
    if len(commands) > 1:
        keys = {key: None for key in keys if len({tree[key] for tree in flat if key in tree}) > 1}
    rows = {key: [tree.get(key, "-") for tree in flat] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flat
