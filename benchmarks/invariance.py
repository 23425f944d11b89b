"""Tables of what `make test-matrix` has measured: `python -m benchmarks.invariance` prints them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.machine import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "invariance.json"
Row = dict[str, Any]


def load() -> dict[str, Any]:
    """The newest record."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def by_kind(record: dict[str, Any]) -> str:
    """Over all runs in fp32."""
    algorithms = _names(row["algorithm"] for row in record["cells"])
    lines = [f"| {' | '.join(['compared', 'allowed', *algorithms])} |", "|---" * (2 + len(algorithms)) + "|"]
    for kind, bound in record["bounds"].items():
        largest = [max(row[kind] for row in record["cells"] if row["algorithm"] == each) for each in algorithms]
        lines.append(f"| {' | '.join([kind, f'{bound:.0e}', *(f'{value:.1e}' for value in largest)])} |")
    return "\n".join(lines)


def by_layout(record: dict[str, Any]) -> str:
    """Over all variants: gradient, weight."""
    return _table("layout", "layout", record["cells"], _gradient_and_weight)


def by_variant(record: dict[str, Any]) -> str:
    """Over all layouts: gradient, weight."""
    return _table("run", "variant", record["cells"], _gradient_and_weight)


def of_experts(record: dict[str, Any]) -> str:
    """Decisions of routers: other ones than in one process in fp32, all."""
    lines = ["| layout | fp32 | bf16 |", "|---|---|---|"]
    rows = [row for kind in ("cells", "bf16") for row in record[kind] if "choices" in row]
    for layout in _names(row["layout"] for row in rows):
        words = [layout]
        for dtype in ("fp32", "bf16"):
            of = [row for row in rows if (row["layout"], row["dtype"]) == (layout, dtype)]
            others, choices = (sum(row[kind] for row in of) for kind in ("other_choices", "choices"))
            words.append(f"{others} of {choices}" if of else "not run")
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def of_bf16(record: dict[str, Any]) -> str:
    """Over all seeds: loss, weights."""
    return _table("layout, bf16", "layout", record["bf16"], lambda rows: _two(rows, "loss", "weights"))


TABLES: tuple[Callable[[dict[str, Any]], str], ...] = (by_kind, by_layout, by_variant, of_experts, of_bf16)


def _gradient_and_weight(rows: Sequence[Row]) -> str:
    return _two(rows, "gradients", "weights")


def _two(rows: Sequence[Row], *kinds: str) -> str:
    return ", ".join(f"{max(row[kind] for row in rows):.1e}" for kind in kinds) if rows else "-"


def _table(title: str, key: str, rows: Sequence[Row], words: Callable[[Sequence[Row]], str]) -> str:
    algorithms = _names(row["algorithm"] for row in rows)
    lines = [f"| {' | '.join([title, *algorithms])} |", "|---" * (1 + len(algorithms)) + "|"]
    for name in _names(row[key] for row in rows):
        cells = [[row for row in rows if (row[key], row["algorithm"]) == (name, each)] for each in algorithms]
        lines.append(f"| {' | '.join([name, *map(words, cells)])} |")
    return "\n".join(lines)


def _names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def main() -> None:
    record = load()
    print("\n\n".join(table(record) for table in TABLES))


if __name__ == "__main__":
    main()
