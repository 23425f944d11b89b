"""A result of `benchmarks.gpu_logprob` as Markdown: one table per kernel and mode, one column per shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
    said = (
        f"Ceilings in this run: {ceilings['copy_bytes_per_s'] / 1e12:.3g} TB/s copy, "
        f"{ceilings['matmul_flops_per_s'] / 1e12:.4g} TFLOP/s bf16 product. "
        f"T = {shapes[0]['tokens'] if shapes else '-'}, bf16. A cell: milliseconds (median of the rounds), share of "
        "the floor, memory beside inputs and results. V/8 is the shard of one rank of eight: "
        "**the collective between ranks is left out**, for everyone."
    )
    lines += [f"{about['device']}, commit {about['commit']}, {packages}. `{about['command']}`", "", said, ""]
    for (kind, mode), title in _TITLES.items():
        chosen = [shape for shape in shapes if shape["kind"] == kind and mode in shape["modes"]]
        if chosen:
            lines += [f"## {title}", "", *_table(chosen, mode), ""]
    for title, found in (("Not timed", _not_timed(result)), ("Notes", _notes(result))):
        lines += [f"## {title}", "", *(sorted(set(found)) or ["Nothing."]), ""]
    return "\n".join(lines)


def _table(shapes: list[dict[str, Any]], mode: str) -> Iterable[str]:
    named: dict[str, dict[str, Any]] = {}
    for shape in shapes:
        named |= {name: row for name, row in shape["modes"][mode].items() if row["status"] == "timed"}
    yield "| candidate | gives | " + " | ".join(shape["name"] for shape in shapes) + " |"
    yield "|---|---|" + "---|" * len(shapes)
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
    for shape, mode, name, row in _rows(result):
        if row["status"] != "timed":
            yield f"- {name}, {shape['name']}, {mode}: {row['status']}, {row['reason']}"


def _notes(result: dict[str, Any]) -> Iterable[str]:
    for _, _, name, row in _rows(result):
        if row["note"]:
            yield f"- {name}: {row['note']}"


def _rows(result: dict[str, Any]) -> Iterable[tuple[dict[str, Any], str, str, dict[str, Any]]]:
    for shape in result["shapes"]:
        for mode, rows in shape["modes"].items():
            for name, row in rows.items():
                yield shape, mode, name, row
