"""The tables of docs/cluster.md, from what `make bench-fits` has found.

`python -m benchmarks.rehearsal.fits_figures` prints them; a test compares the page with them.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.rehearsal.figures import table
from benchmarks.rehearsal.fits import RESULTS

Row = dict[str, Any]


def fits_table(found: dict[str, Row]) -> str:
    """What each job needs."""
    words = ("job", "tensors + margin", "fits in 72", "where the peak is", "host, a node", "longest sequence")
    rows = [
        (
            f"[{name}](../configs/{row['config']}.yaml){', changed' if row['overrides'] else ''}",
            f"{row['peak_gib']:.1f} + {row['margin_gib']:.1f} GiB",
            "yes" if row["fits"] else "no",
            row["tightest"],
            f"{row['host_gib_per_node']:.0f} GiB",
            f"{row['longest_sequence']:,}",
        )
        for name, row in found.items()
    ]
    return table(words, rows)


def changed(found: dict[str, Row]) -> str:
    """What a job has that its file has not."""
    lines = [
        f"{name} is not its file as it stands, but with `{' '.join(row['overrides'])}`."
        for name, row in found.items()
        if row["overrides"]
    ]
    return "\n".join(lines)


def step_table(found: dict[str, Row]) -> str:
    """Seconds of a step with whole responses and in slices, and its parts in slices."""
    words = ("job", "whole", "slices", "engine", "in slices", "rollout", "of it waits", "scores", "training", "rest")
    return table(words, [(name, *_parts(row)) for name, row in found.items()])


def _parts(row: Row) -> tuple[str, ...]:
    seconds, whole_step, settings = row["seconds"], row["step_seconds_estimated"], row["settings"]
    scores = sum(value for phase, value in seconds.items() if phase.startswith("score/") or phase == "reward")
    training = sum(value for phase, value in seconds.items() if phase.startswith("train/"))
    parts = row["rollout"]["slowest"], row["rollout"]["waited"], scores, training
    rest = whole_step - row["rollout"]["slowest"] - scores - training
    return (
        f"{row['step_seconds_whole_estimated']:,.0f} s",
        str(settings["slices"]),
        f"tp {settings['parallel']['tp']}, {settings['vllm']['gpu_memory_utilization']:g}",
        f"{whole_step:,.0f} s",
        *(f"{part:,.0f}" for part in (*parts, rest)),
    )


def time_table(found: dict[str, Row]) -> str:
    """Shares of a step's training phases."""
    words = ("job", "MFU without rollout", "forward and backward", "bubble", "exposed", "again")
    rows = [
        (
            name,
            f"{row['utilisation']:.0%}",
            *(f"{row['training'][key]:.1%}" for key in ("forward_and_backward", "bubble", "exposed", "recomputation")),
        )
        for name, row in found.items()
    ]
    return table(words, rows)


def price_table(found: dict[str, Row]) -> str:
    """Seconds of a step that each feature takes, and its share."""
    names = list(next(iter(found.values()))["price_seconds"])
    rows = [(name, *(_price(row, each) for each in names)) for name, row in found.items()]
    return table(("job", *names), rows)


def _price(row: Row, name: str) -> str:
    seconds = row["price_seconds"][name]
    return f"{seconds:.1f} s, {seconds / row['step_seconds_estimated']:.1%}"


TABLES = (fits_table, changed, step_table, time_table, price_table)


def load() -> dict[str, Row]:
    """What was found."""
    found: dict[str, Row] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def main() -> None:
    for each in TABLES:
        print(each(load()), end="\n\n")


if __name__ == "__main__":
    main()
