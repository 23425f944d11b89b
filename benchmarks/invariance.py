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


def by_layout(record: dict[str, Any]) -> str:
    """Over all variants: gradient, weight."""
    return _table("layout", "layout", record["cells"], _gradient_and_weight)


def by_variant(record: dict[str, Any]) -> str:
    """Over all layouts: gradient, weight."""
    return _table("run", "variant", record["cells"], _gradient_and_weight)


def of_bf16(record: dict[str, Any]) -> str:
    """Over all seeds: loss, weights."""
    return _table("layout, bf16", "layout", record["bf16"], lambda rows: _two(rows, "loss", "weights"))


TABLES: tuple[Callable[[dict[str, Any]], str], ...] = (by_layout, by_variant, of_bf16)


def _gradient_and_weight(rows: Sequence[Row]) -> str:
    return _two(rows, "gradients", "weights")


def _two(rows: Sequence[Row], *kinds: str) -> str:
    return ", ".join(f"{max(row[kind] for row in rows):.1e}" for kind in kinds)


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
    for kind, bound in record["bounds"].items():
        print(f"largest deviation, {kind}: {max(row[kind] for row in record['cells']):.1e} (allowed {bound:.0e})")


if __name__ == "__main__":
    main()
