"""What `make test-matrix` has measured, as JSON; `python -m benchmarks.invariance` makes tables of it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.machine import machine
from tests.distributed.invariance import BANDS, BOUNDS, LAYOUTS, PLAIN, VARIANTS, Cell, Matrix


def write_record(matrix: Matrix, path: Path) -> None:
    """Largest deviations by cell."""
    rows = [
        {**cell._asdict(), "ranks": LAYOUTS[cell.layout].ranks, **({"same_bits": True} if _is_exact(cell) else {})}
        | {kind: float(f"{value:.2e}") for kind, value in found.items()}
        for cell, found in matrix.measured.items()
    ]
    record = {
        "about": machine("make test-matrix"),
        "bounds": BOUNDS,
        "bf16_bands": BANDS,
        "experts": _choices(matrix),
        "cells": [row for row in rows if row["dtype"] == "fp32"],
        "bf16": [row for row in rows if row["dtype"] == "bf16"],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _is_exact(cell: Cell) -> bool:
    return VARIANTS[cell.variant].exact


def _choices(matrix: Matrix) -> dict[str, float]:
    """How near the nearest choice of an expert was, and by how much layouts change that."""
    plain = [
        cell
        for cell in matrix.measured
        if LAYOUTS[cell.layout].model == "experts" and cell.variant == PLAIN and cell.dtype == "fp32"
    ]
    pairs = [(matrix.run(cell).router_gap or 0.0, matrix.reference(cell).router_gap or 0.0) for cell in plain]
    return {
        "smallest_gap_of_logits": float(f"{min(gap for gap, _ in pairs):.2e}"),
        "largest_change_of_it": float(f"{max(abs(gap - wanted) for gap, wanted in pairs):.2e}"),
    }
