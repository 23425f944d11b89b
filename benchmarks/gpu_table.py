"""A result of `benchmarks.gpu_logprob` as Markdown: one table per kernel and mode, one column per shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.gpu_shape import best_peers
from benchmarks.peers_logprob import OURS

_TITLES = {
    ("logits", "forward"): "Log-prob from logits, forward",
    ("logits", "forward+backward"): "Log-prob from logits, forward and backward",
    ("linear", "forward"): "Linear and log-prob, forward",
    ("linear", "forward+backward"): "Linear and log-prob, forward and backward",
}


def markdown(result: dict[str, Any]) -> str:
    """The whole page."""
    about, shapes = result["machine"], result["shapes"]
    lines = ["# Log-probs on one GPU", ""]
    if result["rehearsal"]:
        lines += ["**A rehearsal on a CPU with tiny shapes: no figure here says anything about a GPU.**", ""]
    if not result["finished"]:
        lines += ["**The run ended early: what is here was measured, the rest was not.**", ""]
    packages = ", ".join(f"{name} {number}" for name, number in result["packages"].items() if number)
    ceilings = result["ceilings"]
    conditions = (
        f"Ceilings in this run: {ceilings['copy_bytes_per_s'] / 1e12:.3g} TB/s copy, "
        f"{ceilings['matmul_flops_per_s'] / 1e12:.4g} TFLOP/s bf16 product. "
        f"T = {shapes[0]['tokens'] if shapes else '-'}, bf16. A cell: milliseconds (median of the rounds), share of "
        "the floor, memory beside inputs and results. V/8 is the shard of one rank of eight: "
        "**the collective between ranks is left out**, for everyone."
    )
    lines += [f"{about['device']}, commit {about['commit']}, {packages}. `{about['command']}`", "", conditions, ""]
    for (kind, mode), title in _TITLES.items():
        chosen = [shape for shape in shapes if shape["kind"] == kind and mode in shape["modes"]]
        if chosen:
            lines += [f"## {title}", "", *_table(chosen, mode), ""]
    if result["goals"]:
        lines += ["## Goals", "", "| goal | shape | candidate | wanted | got | met |", "|---|---|---|---|---|---|"]
        lines += [f"| {' | '.join(_goal_cells(goal))} |" for goal in result["goals"]] + [""]
    for title, notes in (("Not timed", _not_timed(result)), ("Notes", _notes(result))):
        lines += [f"## {title}", "", *(sorted(set(notes)) or ["Nothing."]), ""]
    return "\n".join(lines)


def goals(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What our rows were meant to reach, and what they did: share of the floor, memory, and the best peer's time."""
    entries: list[dict[str, Any]] = []
    for shape in shapes:
        for mode, rows in shape["modes"].items():
            for name, row in rows.items():
                if name.startswith(OURS) and row["status"] == "timed":
                    about = {"shape": f"{shape['kind']} {shape['name']} {mode}", "candidate": name}
                    entries += [about | goal for goal in _goals_of(shape, mode, name, row)]
    return entries


def _goals_of(shape: dict[str, Any], mode: str, name: str, row: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """On an H200."""
    if shape["kind"] == "logits":
        share = 0.75 if shape["parts"] > 1 else {"forward": 0.85, "forward+backward": 0.88}[mode]
    else:
        share = {"forward": 0.90, "forward+backward": 0.85}[mode]
    yield _goal("share of the floor", share, row["share_of_floor"], row["share_of_floor"] >= share)
    if (extra := row["peak_extra_bytes"]) is not None:
        # All logits kept in fp32 are the stated budget.
        most = 100e6 + (4 * shape["tokens"] * shape["columns"] if "all kept" in name else 0)
        yield _goal("extra MB, at most", most / 1e6, extra / 1e6, extra <= most)
    # On logits at least as fast as anybody, on linear 1.5 times as fast as the peers that bring kernels of their own.
    ratio, names = (1.0, ("",)) if shape["kind"] == "logits" else (1.5, ("liger", "cut-cross-entropy", "trl", "verl"))
    rivals = {other: theirs for other, theirs in shape["modes"][mode].items() if any(part in other for part in names)}
    if (best := best_peers(rivals | {name: row}).get(name)) is not None:
        got = best["peer_over_ours"]
        yield _goal(f"{best['peer']} over ours", ratio, got, got >= ratio)


def _goal(goal: str, wanted: float, got: float, met: bool) -> dict[str, Any]:
    return {"goal": goal, "wanted": wanted, "got": got, "met": met}


def _goal_cells(goal: dict[str, Any]) -> tuple[str, ...]:
    wanted, got = f"{goal['wanted']:.3g}", f"{goal['got']:.3g}"
    return goal["goal"], goal["shape"], goal["candidate"], wanted, got, "yes" if goal["met"] else "no"


def _table(shapes: list[dict[str, Any]], mode: str) -> Iterable[str]:
    named: dict[str, dict[str, Any]] = {}
    for shape in shapes:
        named |= {name: row for name, row in shape["modes"][mode].items() if row["status"] == "timed"}
    yield "| candidate | gives | " + " | ".join(shape["name"] for shape in shapes) + " |"
    yield "|---|---|" + "---|" * len(shapes)
    if mode == "forward" and shapes[0]["kind"] == "linear":
        bare = (f"{shape['bare_product_ms']:.3f}" for shape in shapes)
        yield "| the product alone, bf16 | logits | " + " | ".join(bare) + " |"
    for name, row in named.items():
        cells = (_cell(shape["modes"][mode].get(name)) for shape in shapes)
        yield f"| {name} | {row['gives']} | " + " | ".join(cells) + " |"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or row["status"] != "timed":
        return "-"
    extra = row["peak_extra_bytes"]
    memory = "" if extra is None else f", {extra / 1e6:.0f} MB"
    return f"{row['ms']['median']:.3f}, {100 * row['share_of_floor']:.0f}%{memory}"


def _not_timed(result: dict[str, Any]) -> Iterable[str]:
    for package, reason in result["missing"].items():
        yield f"- {package}: not here ({reason})"
    where: dict[str, list[str]] = {}
    for shape, mode, name, row in _rows(result):
        if row["status"] != "timed":
            line = f"- {name}: {row['status']}, {row['reason']}"
            where.setdefault(line, []).append(f"{shape['name']} {mode}")
    for line, places in where.items():
        yield f"{line} ({len(places)} times; first {places[0]})"


def _notes(result: dict[str, Any]) -> Iterable[str]:
    for _, _, name, row in _rows(result):
        if row["note"]:
            yield f"- {name}: {row['note']}"
        if row.get("results_in", "float32") != "float32":
            yield f"- {name}: its results are {row['results_in']}"


def _rows(result: dict[str, Any]) -> Iterable[tuple[dict[str, Any], str, str, dict[str, Any]]]:
    for shape in result["shapes"]:
        for mode, rows in shape["modes"].items():
            for name, row in rows.items():
                yield shape, mode, name, row
