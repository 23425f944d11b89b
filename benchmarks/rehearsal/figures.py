"""The tables of docs/benchmarks/rehearsal.md, from what `make bench-rehearsal` has measured.

`python -m benchmarks.rehearsal.figures` prints them; a test compares the page with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.rehearsal.__main__ import RESULTS

GIB = 2**30


def memory_table(found: dict[str, Any]) -> str:
    """Real runs and their rehearsals, by job."""
    rows = [
        (name, each["phases"], f"{each['error_max']:.3%}", f"{each['messages']:,}", each["wire_mismatches"])
        for name, each in found["truth"].items()
    ]
    return table(("job", "phases of all ranks", "largest error of a peak", "messages", "unlike"), rows)


def time_table(found: dict[str, Any]) -> str:
    """Estimated and measured steps, by job: rows are sizes, columns layouts."""
    layouts = ("1 rank", "TP2", "DP2", "PP2")
    jobs: dict[str, dict[str, str]] = {}
    for name, phases in found["time"].items():
        layout = next(each for each in layouts if name.endswith(each))
        step = phases["step"]
        jobs.setdefault(name.removesuffix(layout).strip(), {})[layout] = (
            f"{step['measured']:.3f} s, {step['error']:+.0%}"
        )
    rows = [(job, *(found_of.get(layout, "") for layout in layouts)) for job, found_of in jobs.items()]
    return table(("job", *layouts), rows)


def scale_table(found: dict[str, Any]) -> str:
    """What large jobs take to rehearse, and what they are said to need."""
    rows = [
        (
            name,
            each["ranks_rehearsed"],
            f"{each['seconds'] / 60:.1f} min",
            f"{each['tool_gib']:.2f} GiB",
            f"{each['peak_gib']:.1f} + {each['margin_gib']:.1f} GiB",
            "yes" if each["fits"] else "no",
            f"{each['longest_sequence']:,}" if each["longest_sequence"] else "none",
        )
        for name, each in found["scale"].items()
    ]
    words = ("job", "ranks rehearsed", "time", "memory of the tool", "tensors + margin", "fits", "longest sequence")
    return table(words, rows)


def arithmetic_table(found: dict[str, Any]) -> str:
    """A rank of 70B by hand."""
    (rows,) = (each["arithmetic"] for each in found["scale"].values() if "arithmetic" in each)
    return table(
        ("what", "by hand", "GiB", "rehearsed, GiB", "difference"),
        [
            (
                row["what"],
                row["formula"],
                f"{row['by_hand'] / GIB:.2f}",
                f"{row['rehearsed'] / GIB:.2f}",
                f"{row['difference']:+.1%}",
            )
            for row in rows
        ],
    )


def median_error(found: dict[str, Any], *, one_rank: bool) -> float:
    """Of steps on one rank, or on two."""
    errors = [
        abs(phases["step"]["error"]) for name, phases in found["time"].items() if name.endswith("1 rank") is one_rank
    ]
    return median(errors)


TABLES = (memory_table, time_table, scale_table, arithmetic_table)


def load() -> dict[str, Any]:
    """What was measured."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    found = load()
    for each in TABLES:
        print(each(found), end="\n\n")
    print(f"median error on one rank {median_error(found, one_rank=True):.1%}, on two ", end="")
    print(f"{median_error(found, one_rank=False):.1%}")


if __name__ == "__main__":
    main()
