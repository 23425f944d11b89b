"""What `make bench-prompts` says: ratios, goals, and the tables of docs/benchmarks/prompts.md.

python -m benchmarks.prompts_figures           prints the tables of benchmarks/results/prompts.json
python -m benchmarks.prompts_figures --page    writes them into the page
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.interleaved import ratio
from benchmarks.machine import ROOT
from benchmarks.page import (
    UNKNOWN,
    Ratios,
    Tree,
    fill,
    goals_of,
    load_result,
    median_and_range,
    number,
    over,
    print_or_write,
    table,
)

RESULT = ROOT / "benchmarks" / "results" / "prompts.json"
PAGE = ROOT / "docs" / "benchmarks" / "prompts.md"
PHASES = ("equal_1_1", "equal_4_1", "equal_1_4", "long_tail_1_1", "long_tail_4_1")
PAIRS = ("pair_rm_1_1", "pair_dpo_1_1")
TITLES = {
    "equal_1_1": "64 and 64",
    "equal_4_1": "256 and 64",
    "equal_1_4": "64 and 256",
    "long_tail_1_1": "64 and lognormal, mean 64",
    "long_tail_4_1": "256 and lognormal, mean 64",
    "step_1_1": "whole step, 64 and 64",
    "step_4_1": "whole step, 256 and 64",
    "pair_rm_1_1": "a reward model's step on 64 pairs, 64 and 64",
    "pair_dpo_1_1": "DPO's step on 64 pairs, 64 and 64",
}
LEAST = {"trl_over_ours_equal_1_1": 1.5, "trl_over_ours_equal_4_1": 2.7, "pair_rm_1_1": 1.2}
LEAST |= {f"unshared_over_shared_{name}": 1.0 for name in PHASES}
LEAST |= {f"share_of_flop_ratio_{name}": 0.95 for name in (*PHASES, "pair_rm_1_1")}
MOST = {f"shared_memory_over_unshared_{name}": 1.0 for name in (*PHASES, *PAIRS)}


def flops_of(comparison: Tree, side: str) -> float | None:
    """Counted by operation in one phase: the least of the side's ways, which is that of whole groups."""
    counted = [sum(way["flops"].values()) for way in ways_of(comparison, side).values() if "flops" in way]
    return float(min(counted)) if counted else None


def memory_of(comparison: Tree) -> float | None:
    """Bytes, shared over unshared, beside what stays between phases: the worst of the budgets."""
    shared, unshared = (
        [way["peak_bytes"] for way in ways_of(comparison, side).values() if "peak_bytes" in way]
        for side in ("shared", "unshared")
    )
    return max((above / below for above, below in zip(shared, unshared, strict=True)), default=None)


def ways_of(comparison: Tree, side: str) -> Tree:
    """In the order of their budgets."""
    return {name: way for name, way in comparison["ways"].items() if name.split()[0] == side}


def ratios(comparisons: Mapping[str, Any]) -> Ratios:
    """What the goals are about, and what stands beside it; None where something was left out.

    `trl_over_ours_equal_*` is the lesser of a training phase's and of a whole step's, as in `make bench-packing`.
    """
    found: Ratios = {}
    for name, comparison in comparisons.items():
        if "ways" not in comparison:
            continue
        measured = ratio(comparison, "unshared", "shared")
        found[name if name in PAIRS else f"unshared_over_shared_{name}"] = measured
        if "formula" in comparison:
            flops = over(flops_of(comparison, "unshared"), flops_of(comparison, "shared"))
            found[f"flop_ratio_{name}"] = flops
            found[f"share_of_flop_ratio_{name}"] = over(measured, flops)
            found[f"shared_memory_over_unshared_{name}"] = memory_of(comparison)
    trl = {name: ratio(comparison, "trl", "shared") for name, comparison in comparisons.items() if "ways" in comparison}
    for mix in ("1_1", "4_1"):
        both = [trl.get(f"equal_{mix}"), trl.get(f"step_{mix}")]
        known = [each for each in both if each is not None]
        found[f"trl_over_ours_equal_{mix}"] = min(known) if len(known) == len(both) else None
        found[f"trl_over_ours_equal_{mix}_phase"], found[f"trl_over_ours_equal_{mix}_step"] = both
        found[f"trl_over_ours_long_tail_{mix}"] = trl.get(f"long_tail_{mix}")
    return found


def goals(found: Ratios) -> list[dict[str, Any]]:
    """Each with what was found and whether it is met: None where it was not measured."""
    return goals_of(found, LEAST, MOST)


def in_words(name: str, comparison: Tree) -> str:
    """One line."""
    if "ways" not in comparison:
        return f"{name}: gradient norms differ by {comparison['grad_norms_differ_by']:.2g}"
    seconds = ", ".join(f"{way} {about['seconds']['median']:.3f} s" for way, about in comparison["ways"].items())
    flops = over(flops_of(comparison, "unshared"), flops_of(comparison, "shared"))
    beside = "" if flops is None else f"; unshared over shared {ratio_in_words(comparison)}, of operations {flops:.3f}"
    return f"{name}: {seconds}{beside}"


def ratio_in_words(comparison: Tree) -> str:
    """Of the medians, and between what the rounds lie."""
    value, rounds = ratio(dict(comparison), "unshared", "shared"), comparison["of_rounds"]["unshared_over_shared"]
    return f"{value:.3f} ({rounds['min']:.3f} to {rounds['max']:.3f})"


# --- the page -------------------------------------------------------------------------------------


def tables(result: Tree | None) -> dict[str, list[str]]:
    """By the name of the place on the page; with signs for unknown where there is no result."""
    return {"speed": table_of_speed(result), "trl": table_of_trl(result), "parts": table_of_parts(result)}


def table_of_speed(result: Tree | None) -> list[str]:
    columns = ("tokens of prompt and response", "unshared, s", "shared, s", "unshared over shared (of rounds)")
    more = ("of operations", "share of that (goal 0.95)", "memory, shared over unshared (goal 1)")
    rows = []
    for name in (*PHASES, "step_1_1", "step_4_1", *PAIRS):
        comparison = result["comparisons"].get(name) if result else None
        if result is None or comparison is None:
            rows.append((TITLES[name], *[UNKNOWN] * 6))
            continue
        seconds = (seconds_of(comparison, side) for side in ("unshared", "shared"))
        beside = (result.get(f"{key}_{name}") for key in KEYS)
        rows.append((TITLES[name], *seconds, ratio_in_words(comparison), *map(number, beside)))
    return table((*columns, *more), rows)


KEYS = ("flop_ratio", "share_of_flop_ratio", "shared_memory_over_unshared")


def table_of_trl(result: Tree | None) -> list[str]:
    columns = ("tokens of prompt and response", "TRL, s", "ours, s", "TRL over ours", "goal")
    rows = []
    for name in ("equal_1_1", "step_1_1", "equal_4_1", "step_4_1", "long_tail_1_1", "long_tail_4_1"):
        comparison = result["comparisons"].get(name) if result else None
        goal = LEAST.get(f"trl_over_ours_equal_{name[-3:]}") if "tail" not in name else None
        goal_in_words = str(goal or "")
        if comparison is None or comparison["fastest"]["trl"] is None:
            rows.append((TITLES[name], *[UNKNOWN] * 3, goal_in_words))
            continue
        seconds = (seconds_of(comparison, side) for side in ("trl", "shared"))
        rows.append((TITLES[name], *seconds, number(ratio(comparison, "trl", "shared")), goal_in_words))
    return table(columns, rows)


def table_of_parts(result: Tree | None) -> list[str]:
    """Where a phase's operations and seconds are."""
    columns = ("tokens of prompt and response", "side", "layers", "attention", "vocabulary product")
    more = ("seconds of forwards and backwards", "of the optimizer", "of all else")
    rows = []
    for name in PHASES:
        comparison = result["comparisons"].get(name) if result else None
        for side in ("unshared", "shared"):
            if comparison is None:
                rows.append((TITLES[name], side, *[UNKNOWN] * 6))
                continue
            work = comparison["formula"][side]
            share = [f"{value / sum(work.values()):.0%}" for value in work.values()]
            rows.append((TITLES[name], side, *share, *parts_of(comparison["ways"][comparison["fastest"][side]])))
    return table((*columns, *more), rows)


def parts_of(way: Tree) -> tuple[str, str, str]:
    parts, whole = way["part_seconds"], way["seconds"]["median"]
    optimizer = sum(seconds for name, seconds in parts.items() if name.endswith("_optimizer"))
    computing = sum(seconds for name, seconds in parts.items() if name.endswith(("logprobs", "_backward")))
    return f"{computing:.2f}", f"{optimizer:.3f}", f"{whole - optimizer - computing:.3f}"


def seconds_of(comparison: Tree, side: str) -> str:
    return median_and_range(comparison["ways"][comparison["fastest"][side]]["seconds"])


def about(result: Tree | None) -> str:
    if result is None:
        return f"`make bench-prompts`: {UNKNOWN}"
    of = result["machine"]
    return (
        f"`make bench-prompts`, commit {of['commit']}, {of['cores']} cores, fp32, a Llama of "
        f"{result['parameters'] / 1e6:.1f} M parameters, torch {of['torch']}, {result['threads']} threads, medians of "
        f"{result['rounds']} interleaved rounds (smallest to largest); `benchmarks/results/prompts.json`."
    )


def places(result: Tree | None) -> dict[str, list[str]]:
    return {"about": [about(result)], **tables(result)}


def filled(text: str, result: Tree | None) -> str:
    """The page with its tables. Raises: ValueError where the page lacks the place of one."""
    return fill(text, places(result), "benchmarks.prompts_figures")


def load(path: Path = RESULT) -> Tree | None:
    """None where nothing was measured yet."""
    return load_result(path)


def main() -> None:
    result = load()
    print_or_write(__doc__, PAGE, places(result), lambda text: filled(text, result))


if __name__ == "__main__":
    main()
