"""The tables of docs/demo-tools.md, from benchmarks/results/demo_tools.json, which `make demo-tools-seeds` writes.

python -m tools.demo_tools.tables           prints them
python -m tools.demo_tools.tables --page    writes them into the page
"""

from __future__ import annotations

from benchmarks.machine import ROOT
from benchmarks.page import UNKNOWN, Places, Tree, fill, load_result, print_or_write, table
from tools.demo_tools.figures import FIGURES, shown

MODULE = "tools.demo_tools.tables"
RESULT = ROOT / "benchmarks" / "results" / "demo_tools.json"
PAGE = ROOT / "docs" / "demo-tools.md"


def main() -> None:
    """Print the tables, or write them into the page."""
    result = load_result(RESULT) or {}
    print_or_write(__doc__, PAGE, places_of(result), lambda text: filled(text, result))


def filled(text: str, result: Tree) -> str:
    """The page with the result's figures. Raises: ValueError where a place is missing."""
    return fill(text, places_of(result), MODULE)


def places_of(result: Tree) -> Places:
    """The lines of each place on the page."""
    return {"about": [about(result)], "models": of_models(result), "time": of_time(result)}


def about(result: Tree) -> str:
    """The machine and the commits."""
    seeds = result.get("seeds", {})
    if not seeds:
        return UNKNOWN
    one = next(iter(seeds.values()))["about"]
    commits = "; ".join(f"seed {seed}: commit {of['about']['commit']}" for seed, of in seeds.items())
    return (
        f"`{one['command']}`, {one['cores']} cores, fp32, torch {one['torch']}; {commits}; "
        "`benchmarks/results/demo_tools.json`."
    )


def of_models(result: Tree) -> list[str]:
    """A row a model, a column a figure: the mean over seeds, its interval, and each seed's value."""
    rows = [
        [name, *(f"{shown(words, of[words])} ({_values(of[words]['seeds'])})" for words in FIGURES)]
        for name, of in result.get("summary", {}).items()
    ]
    return table(["model", *FIGURES], rows or [[UNKNOWN] * (len(FIGURES) + 1)])


def _values(shares: list[float]) -> str:
    return ", ".join(f"{100 * share:.1f}" for share in shares)


def of_time(result: Tree) -> list[str]:
    """Minutes of the stages, each seed's."""
    seeds = list(result.get("seeds", {}).values())
    names = list(seeds[0]["seconds"]) if seeds else []
    rows = [[name, ", ".join(f"{each['seconds'][name] / 60:.1f}" for each in seeds)] for name in names]
    return table(["stage", "minutes"], rows or [[UNKNOWN, UNKNOWN]])


if __name__ == "__main__":
    main()
