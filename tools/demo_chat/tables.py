"""The tables of docs/demo-chat.md, from benchmarks/results/demo_chat.json, which `make demo-chat-seeds` writes.

python -m tools.demo_chat.tables           prints them
python -m tools.demo_chat.tables --page    writes them into the page
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.page import UNKNOWN, Places, Tree, by_commit, fill, load_result, print_or_write, table
from tools.demo_chat.figures import COMPARED, SHARES
from tools.demo_chat.sliced import IN_SLICES, WHOLE
from tools.demo_chat.tasks import CHECKS

MODULE = "tools.demo_chat.tables"
RESULT = ROOT / "benchmarks" / "results" / "demo_chat.json"
PAGE = ROOT / "docs" / "demo-chat.md"
SHOWN = 0.01
"""The least GiB or seconds that two decimals show; of less, a difference in per cent says nothing."""


def main() -> None:
    result = load_result(RESULT) or {}
    print_or_write(__doc__, PAGE, places_of(result), lambda text: filled(text, result))


def filled(text: str, result: Tree) -> str:
    """The page with what the result says. Raises: ValueError where a place is missing."""
    return fill(text, places_of(result), MODULE)


def places_of(result: Tree) -> Places:
    """The lines of each place on the page."""
    summary, layouts = result.get("summary", {}), result.get("layouts", {})
    return {
        "about": [about(result)],
        "models": of_summary("model", summary.get("models", {})),
        "checks": of_summary("model", summary.get("checks", {}), CHECKS),
        "differences": of_summary("difference", summary.get("differences", {})),
        "time": of_time(result.get("seeds", {})),
        "layouts": of_layouts(layouts),
        "killed": [of_killed(result.get("killed"))],
        "rehearsed": of_rehearsed(result.get("rehearsed", {})),
        "slices": of_slices(result.get("slices")),
    }


def about(result: Tree) -> str:
    if not result.get("about"):
        return f"`make demo-chat-seeds`: {UNKNOWN}"
    made = result["about"]
    commits = by_commit({name: each["commit"] for name, each in made.items()})
    of = "; ".join(f"{', '.join(names)}: commit {commit}" for commit, names in commits.items())
    one = next(iter(made.values()))
    return (
        f"`{one['command']}`, {one['cores']} cores, fp32, torch {one['torch']}; {of}; "
        "`benchmarks/results/demo_chat.json`."
    )


def of_summary(first: str, figures: Mapping[str, Any], unknown: Sequence[str] = tuple(COMPARED.values())) -> list[str]:
    """A row a model or difference, a column a figure: the mean over seeds, its interval, and the seeds' values; the
    columns are `unknown` where there is none."""
    words = list(next(iter(figures.values()), unknown))
    least = 0.0 if first == "model" else -1.0
    rows = [[name, *(with_seeds(each, of[each], least) for each in words)] for name, of in figures.items()]
    return table([first, *words], rows or [[UNKNOWN] * (len(words) + 1)])


def with_seeds(words: str, figure: Mapping[str, Any], least: float = 0.0) -> str:
    """Such as `71.3% [65.0 to 77.6] (70.1, 69.9, 73.9)`; an interval of shares ends at `least` and at 1. There is none
    where all seeds have the same: nothing is known of their spread."""
    scale, unit, digits = (100.0, "%", 1) if words in SHARES else (1.0, "", 2)

    def number(value: float) -> str:
        return f"{value * scale:.{digits}f}"

    bounds = ""
    if figure.get("low") is not None and len(set(figure["seeds"])) > 1:
        low, high = figure["low"], figure["high"]
        if words in SHARES:
            low, high = max(low, least), min(high, 1.0)
        bounds = f" [{number(low)} to {number(high)}]"
    values = ", ".join(map(number, figure["seeds"]))
    return f"{number(figure['value'])}{unit}{bounds} ({values})"


def of_time(seeds: Mapping[str, Any]) -> list[str]:
    """Minutes, steps, memory and KL of the runs, each seed's."""
    names = list(next(iter(seeds.values()))["training"]) if seeds else []
    rows = []
    for name in names:
        runs = [each["training"][name] for each in seeds.values()]
        minutes = [f"{each['seconds'][name] / 60:.1f}" for each in seeds.values()]
        columns = (
            minutes,
            [str(run["steps"]) for run in runs],
            [f"{run['peak_memory_gib']:.1f}" for run in runs],
            [f"{run['kl_k3']:.3f}" for run in runs],
            [f"{run['rollout_logprob_gap_max']:.1e}" for run in runs],
            [str(run["certificates"]) for run in runs],
        )
        rows.append([name, *(", ".join(column) for column in columns)])
    head = ["run", "minutes", "steps", "most memory, GiB", "KL", "largest log-prob gap, nats", "certificates"]
    return table(head, rows or [[UNKNOWN] * len(head)])


def of_layouts(found: Mapping[str, Any]) -> list[str]:
    """A row a stage and layout."""
    lines: list[str] = []
    for stage, by_layout in found.items():
        names = list(next(iter(by_layout.values())))
        rows = [[layout, *(_precise(of[name]) for name in names)] for layout, of in by_layout.items()]
        lines += [*table([f"{stage}, first step", *names], rows), ""]
    return lines[:-1] if lines else table(["layout", "loss"], [[UNKNOWN, UNKNOWN]])


def of_killed(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return f"Killed and resumed: {UNKNOWN}"
    same = "those" if found["equal"] else f"NOT those ({found['differences']})"
    return (
        f"GRPO of {found['steps']} steps, killed by SIGKILL after {found['killed_at_step']} and started again: metrics "
        f"and weights are {same} of a run that nothing happened to, bit for bit."
    )


def of_rehearsed(found: Mapping[str, Any]) -> list[str]:
    """A row a stage and figure, where both say something and one of them can be seen."""
    rows: list[Sequence[str]] = []
    for stage, kinds in found.items():
        for kind, unit, scale in (("memory", "GiB", 2**30), ("seconds", "s", 1.0)):
            for name, each in kinds[kind].items():
                predicted, measured = each["predicted"], each["measured"]
                if None not in (predicted, measured) and max(predicted, measured) >= SHOWN * scale:
                    off = percent(predicted / measured - 1) if measured >= SHOWN * scale else UNKNOWN
                    rows.append([stage, f"{name}, {unit}", f"{predicted / scale:.2f}", f"{measured / scale:.2f}", off])
    head = ["stage", "figure", "rehearsed", "measured", "off by"]
    return table(head, rows or [[UNKNOWN] * len(head)])


def of_slices(found: Mapping[str, Any] | None) -> list[str]:
    """A row a figure: whole, in slices, the difference with its 90% interval, and the seeds' differences."""
    head = ["after as many steps", "whole", "in slices", "difference, points", "90% interval", "seeds"]
    if found is None:
        return table(head, [[UNKNOWN] * len(head)])
    rows = []
    for words, each in found["differences"].items():
        means = [fmean(seed[name][words] for seed in found["seeds"].values()) for name in (WHOLE, IN_SLICES)]
        numbers = [f"{100 * each[key]:+.1f}" for key in ("value", "low", "high")]
        seeds = ", ".join(f"{100 * value:+.1f}" for value in each["seeds"])
        rows.append([words, *(f"{mean:.1%}" for mean in means), numbers[0], f"{numbers[1]} to {numbers[2]}", seeds])
    kl = [fmean(seed[name]["kl"] for seed in found["seeds"].values()) for name in (WHOLE, IN_SLICES)]
    return table(head, [*rows, ["KL to SFT, nats a token", *(f"{value:.3f}" for value in kl), "", "", ""]])


def percent(share: float) -> str:
    """Signed, but for 0."""
    return "0%" if abs(share) < 0.005 else f"{share:+.0%}"


def _precise(value: float) -> str:
    return f"{value:.6g}"


if __name__ == "__main__":
    main()
