"""What `make test-matrix` has measured, as JSON; `python -m benchmarks.invariance` makes tables of it."""

import json
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from tests.distributed.invariance import BOUNDS, LAYOUTS, VARIANTS, Cell, Matrix, bf16_cells, cells

Row = dict[str, Any]


def write_record(matrix: Matrix, path: Path) -> None:
    """Largest deviations by cell, each with the commit that it was measured at. Adds to a record that was made on the
    same machine with the same versions, of which other cells have been run before."""
    about = machine("make test-matrix")
    commit = about.pop("commit")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if record.get("about") != about:
        record = {"about": about, "bounds": BOUNDS, "cells": [], "bf16": []}
    order = (*cells(), *bf16_cells())
    by_cell = {cell_of(row): row for row in (*record["cells"], *record["bf16"])}
    by_cell |= {cell: {**_row(matrix, cell), "commit": commit} for cell in matrix.measured}
    rows = [by_cell[cell] for cell in order if cell in by_cell]
    record["cells"] = [row for row in rows if row["dtype"] == "fp32"]
    record["bf16"] = [row for row in rows if row["dtype"] == "bf16"]
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def cell_of(row: Row) -> Cell:
    """Which cell of the matrix a row of the record is of."""
    return Cell(**{name: row[name] for name in Cell._fields})


def _row(matrix: Matrix, cell: Cell) -> Row:
    row: Row = {**cell._asdict(), "ranks": LAYOUTS[cell.layout].ranks}
    if VARIANTS[cell.variant].exact:
        row["same_bits"] = True
    row |= {kind: float(f"{value:.2e}") for kind, value in matrix.measured[cell].items()}
    if cell in matrix.choices:
        row["other_choices"], row["choices"] = matrix.choices[cell]
        row["nearest_choice"] = float(f"{matrix.run(cell).router_gap:.2e}")
        change = abs(matrix.run(cell).router_gap - matrix.reference(cell).router_gap)
        row["change_of_nearest_choice"] = float(f"{change:.2e}")
    return row
