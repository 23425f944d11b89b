"""`megarlhf compare`: final figures, differing configuration keys and curves of several runs on one page.

The runs may be of different commands. A loss of one command is not compared with that of another. Metrics and keys
that only one run or command has are folded, but for the figures of a report's summary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megarlhf.observe.report.chart_list import SUMMARY, Chart, axis_of
from megarlhf.observe.report.charts import Drawn, draw
from megarlhf.observe.report.html_page import check_replaceable, document, fill, write_whole, written_by
from megarlhf.observe.report.recorded_run import RecordedRun, read_runs, run_kind
from megarlhf.observe.terminal.progress import format_number, make_console, table

COMPARE = "compare"
"""The command, as its pages name it."""
_FIRST = ("test_", "eval_", "reward_mean", "loss")
"""Beginnings of the names of metrics that are shown above the others."""
_LOSSES = ("loss", "eval_loss", "test_loss")
"""Metrics that measure something else in each command."""
NO_KEY = "-"
"""Shown where a run has no such key."""
_APART = "Losses of different commands measure different things: each command has rows and charts of its own."


@dataclass(frozen=True)
class Final:
    """A metric's last value in a run, and its interval where one is known."""

    value: float
    step: int
    interval: tuple[float, float] | None = None
    largest: float = field(default=0.0, compare=False)
    """The greatest magnitude of the run's values, beside which rounding noise is shown as such."""

    def __str__(self) -> str:
        """`0.75 [0.7, 0.79]`, for example."""
        bounds = "" if self.interval is None else f" [{', '.join(map(format_number, self.interval))}]"
        return format_number(self.value, self.largest) + bounds


@dataclass(frozen=True)
class Comparison:
    """A row of final figures: a metric, its label, and its last value in each run. None: the run has none."""

    label: str
    metric: str
    finals: Sequence[Final | None]

    @property
    def is_shared(self) -> bool:
        """Whether two runs have it."""
        return sum(final is not None for final in self.finals) > 1


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
    rows = final_figures(runs, [intervals_of(path) for path in run_dirs])
    if not _common_metrics(runs):
        raise ValueError(f"{', '.join(names)} have no metric in common: nothing can be compared")
    shown = [row for row in rows if row.is_shared or row.metric in SUMMARY]
    alone = [row for row in rows if row not in shown]
    configs = [run.config for run in runs]
    differences, of_some = differing_keys(configs), keys_of_some_commands(configs)
    remark = _APART if any(row.label != row.metric for row in shown) else ""
    figures: list[dict[str, Any]] = []
    drawn_runs = {row.label: _runs_of(row, runs) for row in shown}

    def draw_row(chart: Chart, _: object) -> Drawn:
        return draw(figures, chart, drawn_runs[chart.title])

    body = fill(
        "compare.html", runs=runs, names=names, remark=remark, differences=differences, of_some=of_some,
        shown=_by_label(shown), alone=_by_label(alone), charts=[_chart(row, runs) for row in shown], draw=draw_row,
    )  # fmt: skip
    write_whole(out, document(title, COMPARE, [body], figures))
    console = make_console()
    console.print(table("final figures", [(row.label, *row.finals) for row in shown], ("metric", *names)))
    if differences:
        console.print(table("configuration", [(key, *row) for key, row in differences.items()], ("key", *names)))
    if remark:
        console.print(remark)
    if alone or of_some:
        console.print(f"On the page only: {len(alone)} metrics that one run has, {len(of_some)} keys of some commands.")


def _common_metrics(runs: Sequence[RecordedRun]) -> list[str]:
    names = [name for run in runs for name in run.metrics() if name != "wall_clock" and run.finite(name)]
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def _by_label(rows: Sequence[Comparison]) -> dict[str, Sequence[Final | None]]:
    return {row.label: row.finals for row in rows}


def _runs_of(row: Comparison, runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """The runs in their places, so that each keeps its colour; those that are not in the row without their values."""
    pairs = zip(runs, row.finals, strict=True)
    return [run if final is not None else replace(run, rows=[]) for run, final in pairs]


def _chart(row: Comparison, runs: Sequence[RecordedRun]) -> Chart:
    first = next(run for run, final in zip(runs, row.finals, strict=True) if final is not None)
    return Chart(row.label, (row.metric,), axis=axis_of(row.metric, first.kind))


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
) -> list[Comparison]:
    """The last finite value of every metric in each run. A loss has a row for each command, or each loss of `dpo`."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics() if name != "wall_clock"))
    rows: list[Comparison] = []
    for name in sorted(names, key=lambda name: (not name.startswith(_FIRST), names.index(name))):
        row: list[Final | None] = []
        for run, known in zip(runs, intervals, strict=True):
            points = run.finite(name)
            largest = max((abs(value) for _, value in points), default=0.0)
            row.append(Final(points[-1][1], points[-1][0], known.get(name), largest) if points else None)
        measures = [_measure_of(run) if name in _LOSSES else "" for run in runs]
        present = dict.fromkeys(measure for measure, final in zip(measures, row, strict=True) if final is not None)
        for measure in present:
            label = name if len(present) == 1 else f"{name} ({measure})"
            of_measure = [final if each == measure else None for each, final in zip(measures, row, strict=True)]
            rows.append(Comparison(label, name, of_measure))
    return rows


def _measure_of(run: RecordedRun) -> str:
    """Name of the loss of a run. An evaluation has the loss of what it evaluates."""
    kind = run_kind(run.rows)
    return str(run.settings.get("loss", kind)) if kind == "dpo" else kind


def differing_keys(configs: Sequence[str | None]) -> dict[str, list[str]]:
    """Values of each configuration key that differs between runs; a dash where a run has no such key.

    Runs of different commands have different keys. For them a key counts only if two runs have it with different
    values; see `keys_of_some_commands` for the others.
    """
    rows = _rows_of_keys(configs)
    if _are_of_several_commands(configs):
        rows = {key: row for key, row in rows.items() if len(set(row) - {NO_KEY}) > 1}
    return rows


def keys_of_some_commands(configs: Sequence[str | None]) -> dict[str, list[str]]:
    """Values of the keys that runs of some commands have, all with the same value, and runs of others have not."""
    if not _are_of_several_commands(configs):
        return {}
    differing = differing_keys(configs)
    return {key: row for key, row in _rows_of_keys(configs).items() if key not in differing}


def _are_of_several_commands(configs: Sequence[str | None]) -> bool:
    return len({text.partition("\n")[0] for text in configs if text is not None and text.startswith("#")}) > 1


def _rows_of_keys(configs: Sequence[str | None]) -> dict[str, list[str]]:
    """All keys that are not the same in all runs. `data.train` and `data.train.path` are two spellings of one key."""
    trees = [{} if text is None else _flat(yaml.safe_load(text) or {}) for text in configs]
    short = {key for tree in trees for key in tree if any(f"{key}.path" in other for other in trees)}
    for tree in trees:
        for key in short & {key.removesuffix(".path") for key in tree if key.endswith(".path")}:
            tree[key] = tree.pop(f"{key}.path")
    keys = dict.fromkeys(key for tree in trees for key in tree if key != "run.dir")
    rows = {key: [tree.get(key, NO_KEY) for tree in trees] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flat
