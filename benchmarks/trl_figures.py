"""What `make bench-trl` and `make bench-trl-curves` say: figures, goals, and the tables of docs/benchmarks/trl.md.

python -m benchmarks.trl_figures           prints the tables of benchmarks/results/trl.json and trl_curves.json
python -m benchmarks.trl_figures --page    writes them into the page
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.page import (
    UNKNOWN,
    Ratios,
    Tree,
    by_commit,
    fill,
    goals_of,
    load_result,
    median_and_range,
    number,
    over,
    print_or_write,
    table,
)

RESULT = ROOT / "benchmarks" / "results" / "trl.json"
CURVES = ROOT / "benchmarks" / "results" / "trl_curves.json"
PAGE = ROOT / "docs" / "benchmarks" / "trl.md"
MODULE = "benchmarks.trl_figures"
TITLES = {
    "grpo_mixed": "GRPO, a whole step, lengths as they come",
    "grpo_equal": "GRPO, a whole step, equal lengths",
    "sft_mixed": "SFT, a step on 32 texts, lognormal lengths",
    "sft_equal": "SFT, a step on 32 texts, equal lengths",
    "rm_mixed": "reward model, a step on 16 pairs, lognormal lengths",
    "rm_equal": "reward model, a step on 16 pairs, equal lengths",
}
DIRECTION = (
    "Figures with the name of a comparison are OUR median seconds over TRL's: below 1, ours is faster (in packing.json "
    "and prompts.json TRL's seconds are over ours). NAME_memory is OUR peak memory over TRL's, without our rollout "
    "engine's own: at most 1, ours takes no more."
)
MOST = {
    "grpo_mixed": 0.5,
    "grpo_equal": 0.8,
    "sft_mixed": 0.7,
    "sft_equal": 1.05,
    "rm_mixed": 0.7,
    "rm_equal": 1.05,
    **{f"{name}_memory": 1.0 for name in TITLES},
}
PARTS = {
    "generation": ("generate",),
    "log-probs": ("old_logprobs", "reference_logprobs"),
    "forward and backward": ("_forward_backward", "forward", "backward", "loss_after_logprobs"),
    "optimizer": ("optimizer", "clip"),
    "weights to the engine": ("update_weights",),
}
"""By column the parts of a step, by the ends of their names; what is in none is "other"."""


def figures(comparisons: Mapping[str, Any]) -> Ratios:
    """By name: ours over TRL's; None where a side was left out."""
    found: Ratios = {}
    for name, comparison in comparisons.items():
        ours, trl = (seconds_of(comparison, side) for side in ("ours", "trl"))
        found[name] = over(ours and ours["median"], trl and trl["median"])
        found[f"{name}_memory"] = over(*(peak_of(comparison, side) for side in ("ours", "trl")))
    return found


def seconds_of(comparison: Tree, side: str) -> Any:
    """Median and range of a step; None where the side was left out."""
    way = comparison["fastest"].get(side)
    return None if way is None else comparison["ways"][way]["seconds"]


def peak_of(comparison: Tree, side: str) -> float | None:
    return comparison["memory"].get(side, {}).get("peak_bytes")


def goals(found: Ratios) -> list[dict[str, Any]]:
    """Each with what was found and whether it is met: None where it was not measured."""
    return goals_of(found, {}, MOST)


def in_words(name: str, comparison: Tree) -> str:
    """One line."""
    seconds = ", ".join(f"{way} {about['seconds']['median']:.2f} s" for way, about in comparison["ways"].items())
    found = figures({name: comparison})
    said = "; ".join(f"{key} {value:.2f}" for key, value in found.items() if value is not None)
    apart = comparison["agreement"]["norms_differ_by"]
    return f"{name}: {seconds}; {said or 'without TRL'}; gradient norms differ by {apart or 0.0:.1e}"


def parts_of(way: Tree) -> dict[str, float]:
    """Of the round with the median of seconds, of an even number the lower, by column of the table; "other" is the
    rest of it."""
    measure = "step_seconds" if "step_seconds" in way["rounds"][0] else "phase_seconds"
    of = sorted(way["rounds"], key=lambda answer: answer[measure])[(len(way["rounds"]) - 1) // 2]
    parts = {
        column: sum(seconds for name, seconds in of["parts"].items() if name.endswith(ends))
        for column, ends in PARTS.items()
    }
    return parts | {"other": of[measure] - sum(parts.values())}


# --- the page -------------------------------------------------------------------------------------


def tables(result: Tree | None) -> dict[str, list[str]]:
    """By the name of the place on the page; with signs for unknown where there is no result."""
    return {
        "speed": table_of_speed(result),
        "parts": table_of_parts(result),
        "memory": table_of_memory(result),
        "ways": table_of_ways(result),
    }


def comparison_of(result: Tree | None, name: str) -> Any:
    """None where it was not measured, or one side of it was left out."""
    found = result["comparisons"].get(name) if result else None
    return found if found is not None and "trl" in found["fastest"] else None


def table_of_speed(result: Tree | None) -> list[str]:
    columns = (
        "comparison",
        "ours, s",
        "TRL, s",
        "ours over TRL (of rounds)",
        "goal",
        "ours, tokens/s",
        "TRL, tokens/s",
    )
    rows = []
    for name, title in TITLES.items():
        comparison = comparison_of(result, name)
        if comparison is None:
            rows.append((title, *[UNKNOWN] * 3, f"{MOST[name]}", *[UNKNOWN] * 2))
            continue
        sides = [comparison["ways"][comparison["fastest"][side]] for side in ("ours", "trl")]
        rounds = comparison["ours_over_trl_of_rounds"]
        ratio = f"{figures({name: comparison})[name]:.2f} ({rounds['min']:.2f} to {rounds['max']:.2f})"
        seconds = (median_and_range(side["seconds"]) for side in sides)
        rows.append((title, *seconds, ratio, f"{MOST[name]}", *(f"{side['tokens_per_second']:.0f}" for side in sides)))
    return table(columns, rows)


def table_of_parts(result: Tree | None) -> list[str]:
    """Where a step's seconds are."""
    rows = []
    for name, title in TITLES.items():
        comparison = comparison_of(result, name)
        for side in ("ours", "trl"):
            if comparison is None:
                rows.append((title, "TRL" if side == "trl" else side, *[UNKNOWN] * (len(PARTS) + 1)))
                continue
            parts = parts_of(comparison["ways"][comparison["fastest"][side]])
            rows.append((title, "TRL" if side == "trl" else side, *(number(part or None) for part in parts.values())))
    return table(("comparison", "side", *PARTS, "other"), rows)


def table_of_memory(result: Tree | None) -> list[str]:
    columns = ("comparison", "ours, GB", "TRL, GB", "ours over TRL (goal 1)", "ours with its engine, GB")
    rows = []
    for name, title in TITLES.items():
        comparison = comparison_of(result, name)
        if comparison is None:
            rows.append((title, *[UNKNOWN] * 4))
            continue
        ours, trl, engine = (peak_of(comparison, side) for side in ("ours", "trl", "ours with its engine"))
        gb = [number(bytes_ and bytes_ / 1e9) for bytes_ in (ours, trl)]
        rows.append((title, *gb, number(over(ours, trl)), number(engine and engine / 1e9)))
    return table(columns, rows)


def table_of_ways(result: Tree | None) -> list[str]:
    """What each side was tried with."""
    rows: list[Sequence[str]] = []
    for name, title in TITLES.items():
        comparison = comparison_of(result, name)
        if comparison is None:
            rows.append((title, UNKNOWN, UNKNOWN))
            continue
        tried = ", ".join(f"{way} {seconds:.1f} s" for way, seconds in comparison["tried"].items())
        rows.append((title, tried, ", ".join(comparison["fastest"].values())))
    return table(("comparison", "tried, seconds of a warm training phase", "compared"), rows)


def table_of_curves(curves: Tree | None) -> list[str]:
    """Means over the seeds, in brackets the range."""
    columns = ("step", "side", "seconds of steps", "mean test reward", "right in everything")
    rows = []
    for side, course in (curves["means"] if curves else {"ours": [], "trl": []}).items():
        name = "TRL" if side == "trl" else side
        for at in course:
            reward, right = (
                (f"{at[key]:.3f}", *map("{:.3f}".format, at[f"{key}_range"])) for key in ("reward", "right")
            )
            said = [f"{mean} ({least} to {most})" for mean, least, most in (reward, right)]
            rows.append((f"{at['step']}", name, f"{at['seconds']:.0f}", *said))
        if not course:
            rows.append((UNKNOWN, name, *[UNKNOWN] * 3))
    return table(columns, rows)


def about_curves(curves: Tree | None) -> str:
    if curves is None:
        return "**Not measured yet.** `make bench-trl-curves` takes hours; it fills the table below."
    machines = {f"seed {seed}": machine_of(curves, found) for seed, found in curves["seeds"].items()}
    said = (
        f"`make bench-trl-curves`, {where(machines)}, {curves['steps']} steps, learning rate {curves['lr']:g}, KL "
        f"coefficient {curves['beta']:g}, rule `{curves['rule']}`; `benchmarks/results/trl_curves.json`."
    )
    if (ratio := curves["ours_over_trl"]) is None:
        return said
    until = curves["seconds_until"]
    each = ", ".join(
        "…" if of["ours_over_trl"] is None else f"{of['ours_over_trl']:.2f}" for of in curves["of_seeds"].values()
    )
    steps = curves["steps_ours_over_trl"]
    return (
        f"{said}\n\n**As many steps take {steps:.2f} of TRL's seconds**, which are also fewer where a side has learned "
        f"earlier to answer shortly. To a mean test reward of {curves['level']:.3f}, the lesser of both sides' best, "
        f"ours takes {until['ours']:.0f} s and TRL {until['trl']:.0f} s: {ratio:.2f} (each seed to its own: {each}); "
        "that ours also takes fewer steps is not explained." + of_the_same(curves)
    )


def of_the_same(curves: Tree) -> str:
    """Nothing where it was not looked at."""
    if not (updates := curves.get("updates")):
        return ""
    commit = machine_of(curves, updates)["commit"]
    rewards, differ = updates["rewards"], updates["norms_differ_by"]
    return (
        f" Of the same responses both make the same (commit {commit}): ours on the responses that TRL drew in "
        f"{len(differ)} steps has gradient norms that differ by {max(differ):.0e} at most, and a test reward of "
        f"{rewards['ours']:.4f} after them, TRL {rewards['trl']:.4f}."
    )


def machine_of(result: Tree, found: Tree) -> Tree:
    """What a part of a result was measured on: its own, or that of the whole file, with the part's commit."""
    commit = {"commit": found["commit"]} if "commit" in found else {}
    return {**(found.get("machine") or result["machine"]), **commit}


def where(machines: Mapping[str, Tree]) -> str:
    """By name of a part: commit, cores and torch; of what differs each with the parts that it is of."""

    def told(values: Mapping[str, str]) -> str:
        names = by_commit(values)
        return next(iter(names)) if len(names) == 1 else ", ".join(f"{k} ({', '.join(of)})" for k, of in names.items())

    of = {
        name: {"commit": each["commit"], "machine": f"{each['cores']} cores, torch {each['torch']}"}
        for name, each in machines.items()
    }
    parts = [told({name: each[key] for name, each in of.items()}) for key in ("commit", "machine")]
    return f"commit {parts[0]}, {parts[1]}"


def about(result: Tree | None) -> str:
    if result is None:
        return f"`make bench-trl`: {UNKNOWN}"
    machines = {name: machine_of(result, found) for name, found in result["comparisons"].items()}
    return (
        f"`make bench-trl`, {where(machines)}, {result['model']} in fp32, {result['threads']} threads of one process, "
        f"medians of {result['rounds']} interleaved rounds (smallest to largest); `benchmarks/results/trl.json`."
    )


def conclusion(result: Tree) -> str:
    """All ratios in one sentence, and the goals that are missed."""
    found = figures(result["comparisons"])
    said = ", ".join(f"{found[name]:.2f} ({title})" for name, title in TITLES.items() if found.get(name) is not None)
    missed = "; ".join(goal["in_words"] for goal in goals(found) if goal["met"] is False)
    return f"**Of TRL's time ours takes {said}.** Goals of this page that are missed: {missed or 'none'}."


def places(result: Tree | None, curves: Tree | None) -> dict[str, list[str]]:
    of_curves = {"about-curves": [about_curves(curves)], "curves": table_of_curves(curves)}
    of_result = [about(result)] if result is None else [conclusion(result), "", about(result)]
    return {"about": of_result, **tables(result), **of_curves}


def filled(text: str, result: Tree | None, curves: Tree | None) -> str:
    """The page with its tables. Raises: ValueError where the page lacks the place of one."""
    return fill(text, places(result, curves), MODULE)


def load() -> tuple[Tree | None, Tree | None]:
    """Result and curves; None for what was not measured yet."""
    return load_result(RESULT), load_result(CURVES)


def main() -> None:
    result, curves = load()
    print_or_write(__doc__, PAGE, places(result, curves), lambda text: filled(text, result, curves))


if __name__ == "__main__":
    main()
