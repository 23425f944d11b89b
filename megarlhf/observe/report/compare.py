"""`megarlhf compare`: several runs on one page: final figures, what their configurations differ in, curves over each
other. Runs of different commands have those metrics in common that both log."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarlhf.observe.report.chart_list import Chart
from megarlhf.observe.report.charts import RecordedRun
from megarlhf.observe.report.html_page import DRAW, check_replaceable, document, write_whole, written_by
from megarlhf.observe.report.page import distinct, panel, read_run
from megarlhf.observe.terminal.progress import format_number, make_console, table

COMPARE = "compare"
"""The command, as its pages name it."""
_NOT_COMPARED = ("wall_clock",)
_PLACES = ("run.dir",)
"""Keys that differ in any two runs."""
_FIRST = ("test_", "eval_", "reward_mean", "loss")
"""Beginnings of metrics that stand above the others."""


@dataclass(frozen=True)
class Final:
    """A metric's last value in a run, and its interval where one is known."""

    value: float
    step: int
    interval: tuple[float, float] | None = None

    @property
    def words(self) -> str:
        """Such as `0.75 [0.7, 0.79]`."""
        bounds = "" if self.interval is None else f" [{', '.join(map(format_number, self.interval))}]"
        return format_number(self.value) + bounds


def compare(run_dirs: Sequence[Path], out: Path, *, title: str) -> None:
    """Write the page, and print its tables.

    Raises: ValueError for fewer than two runs, for one named twice, for a directory without a run, and for runs that
    have no metric in common.
    """
    paths = [path.resolve() for path in run_dirs]
    if twice := [str(given) for given, path in zip(run_dirs, paths, strict=True) if paths.count(path) > 1]:
        raise ValueError(f"{' and '.join(twice)}: one directory, named {len(twice)} times; name each run once")
    if len(run_dirs) < 2:
        raise ValueError("one run compares with nothing; name two or more (megarlhf report shows one)")
    check_replaceable(out, written_by(COMPARE), "comparison of megarlhf")
    runs = distinct([read_run(path) for path in run_dirs])
    finals = final_figures(runs, [intervals_of(path) for path in run_dirs])
    if not finals:
        raise ValueError(f"{', '.join(run.name for run in runs)} have no metric in common: nothing can be compared")
    differences = differing_keys([run.config for run in runs])
    write_whole(out, _page(runs, finals, differences, title))
    console, names = make_console(), [run.name for run in runs]
    rows = [(name, *(each.words if each else None for each in row)) for name, row in finals.items()]
    console.print(table("final figures", rows, ("metric", *names)))
    if differences:
        console.print(table("configuration", [(key, *row) for key, row in differences.items()], ("key", *names)))


def intervals_of(run_dir: Path) -> dict[str, tuple[float, float]]:
    """Of figures of the run, by name, as `eval.json` and `calibration.json` have them."""
    found: dict[str, tuple[float, float]] = {}
    for name, each in _read(run_dir / "eval.json").get("figures", {}).items():
        if each.get("low") is not None and each.get("high") is not None:
            found[name] = each["low"], each["high"]
    if interval := _read(run_dir / "calibration.json").get("accuracy_interval"):
        found["eval_pair_accuracy"] = interval[0], interval[1]
    return found


def _read(path: Path) -> Mapping[str, Any]:
    """Raises: ValueError for a damaged file."""
    if not path.is_file():
        return {}
    try:
        tree: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, or evaluate again") from error
    return tree


def final_figures(
    runs: Sequence[RecordedRun], intervals: Sequence[Mapping[str, tuple[float, float]]]
) -> dict[str, list[Final | None]]:
    """By metric that two runs or more have: the last finite value of each run, None where it has none."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics() if name not in _NOT_COMPARED))
    finals: dict[str, list[Final | None]] = {}
    for name in sorted(names, key=lambda name: (not name.startswith(_FIRST), names.index(name))):
        row: list[Final | None] = []
        for run, known in zip(runs, intervals, strict=True):
            points = run.finite(name)
            row.append(Final(points[-1][1], points[-1][0], known.get(name)) if points else None)
        if sum(each is not None for each in row) >= 2:
            finals[name] = row
    return finals


def differing_keys(configs: Sequence[str | None]) -> dict[str, list[str]]:
    """By key that has not the same value in all runs, each run's value in words; a dash where it has no such key. Of
    runs of different commands those that two runs have, with different values: the others follow from the command."""
    known = [text for text in configs if text is not None]
    flat = [{} if text is None else _flat(yaml.safe_load(text) or {}) for text in configs]
    keys = dict.fromkeys(key for tree in flat for key in tree if key not in _PLACES)
    if len({text.partition("\n")[0] for text in known if text.startswith("#")}) > 1:
        keys = {key: None for key in keys if len({tree[key] for tree in flat if key in tree}) > 1}
    rows = {key: [tree.get(key, "-") for tree in flat] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return found


def _page(
    runs: Sequence[RecordedRun],
    finals: Mapping[str, Sequence[Final | None]],
    differences: Mapping[str, Sequence[str]],
    title: str,
) -> str:
    figures: list[dict[str, Any]] = []
    names = [run.name for run in runs]
    rows = {name: [_cell(each) for each in row] for name, row in finals.items()}
    parts = ["<h2>Final figures</h2>", '<p class="soft">The last value of each run; in brackets its 95% interval.</p>']
    parts.append(_table("metric", names, rows))
    parts.append("<h2>Configuration</h2>")
    plain = {key: [html.escape(value) for value in row] for key, row in differences.items()}
    parts.append(_table("key", names, plain) if plain else "<p>No key differs but run.dir.</p>")
    charts = [panel(Chart(title=name, metrics=(name,)), _with(runs, name), figures) for name in finals]
    parts += ["<h2>Curves</h2>", f'<div class="grid">{"".join(charts)}</div>']
    return document(title, COMPARE, parts, figures, script=DRAW)


def _with(runs: Sequence[RecordedRun], metric: str) -> list[RecordedRun]:
    """Those that have it."""
    return [run for run in runs if run.series(metric)]


def _cell(final: Final | None) -> str:
    return "-" if final is None else f'<b>{final.words}</b> <span class="soft">step {final.step}</span>'


def _table(first: str, names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Cells are HTML."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (first, *names))
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        for name, row in rows.items()
    )
    return f'<div class="panel scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
