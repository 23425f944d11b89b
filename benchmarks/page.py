"""Goals of a benchmark, and the tables of its page in docs/benchmarks/, made from its result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

Tree = Mapping[str, Any]
Places = Mapping[str, Sequence[str]]
"""Lines by the name of the place on the page where they belong."""
Ratios = dict[str, float | None]
UNKNOWN = "…"
"""Where there is no result."""


def over(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def goals_of(found: Ratios, least: Mapping[str, float], most: Mapping[str, float]) -> list[dict[str, Any]]:
    """Each with what was found and whether it is met: None where it was not measured."""
    made = []
    for word, bounds in (("at least", least), ("at most", most)):
        for name, bound in bounds.items():
            value = found.get(name)
            met = None if value is None else value >= bound if word == "at least" else value <= bound
            said = "not measured" if value is None else f"{value:.3f}, {'met' if met else 'MISSED'}"
            in_words = f"{name}: {said} (goal: {word} {bound})"
            made.append({"name": name, word.replace(" ", "_"): bound, "found": value, "met": met})
            made[-1]["in_words"] = in_words
    return made


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def median_and_range(seconds: Tree) -> str:
    """Of `interleaved.spread`."""
    return f"{seconds['median']:.2f} ({seconds['min']:.2f} to {seconds['max']:.2f})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def fill(text: str, places: Places, module: str) -> str:
    """The page with these lines at its places. Raises: ValueError where the page lacks one."""
    for name, lines in places.items():
        begin, end = f"<!-- {name}: made by `python -m {module} --page` -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(f"the page needs one line {begin!r}, and one line {end!r} below it")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{rest.split(end)[1]}"
    return text


def load_result(path: Path) -> Tree | None:
    """None where nothing was measured yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def by_commit(commits: Mapping[str, str]) -> dict[str, list[str]]:
    """By commit the names of what was measured at it, in their order; `commits`: of each name."""
    names: dict[str, list[str]] = {}
    for name, commit in commits.items():
        names.setdefault(commit, []).append(name)
    return names


def print_or_write(doc: str | None, page: Path, places: Places, fill: Callable[[str], str]) -> None:
    """What `python -m benchmarks.X_figures` does: prints the tables, or with --page writes them into the page."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help=f"write {page.relative_to(ROOT)}")
    if parser.parse_args().page:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for number, lines in enumerate(places.values()):
        print("\n".join(["", *lines] if number else lines))
