"""Tables of figures on pages are those of benchmarks/results/. Not covered: figures in sentences."""

import json

import pytest

from benchmarks import invariance, parallel
from benchmarks.rehearsal import figures, fits_figures, prompts
from benchmarks.rehearsal.fits import HOST_MOST_GIB, MOST_GIB
from tests.distributed.invariance import BANDS, BOUNDS, LAYOUTS, OTHER_CHOICES, OTHER_CHOICES_BF16, bf16_cells, cells
from tests.distributed.invariance_record import cell_of
from tests.docs.repository import ROOT


@pytest.mark.parametrize("table", figures.TABLES)
def test_the_page_on_rehearsals_has_the_table(table) -> None:
    page = (ROOT / "docs" / "benchmarks" / "rehearsal.md").read_text(encoding="utf-8")
    assert table(figures.load()) in page, "python -m benchmarks.rehearsal.figures prints it"


def test_the_record_of_the_invariance_matrix_is_whole_and_within_its_bounds() -> None:
    """In fp32 and in bf16, expert choices among them."""
    record = invariance.load()
    assert {cell_of(row) for row in record["cells"]} == set(cells())
    assert {cell_of(row) for row in record["bf16"]} == set(bf16_cells())
    assert record["bounds"] == BOUNDS
    assert all(row[kind] <= bound for row in record["cells"] for kind, bound in BOUNDS.items())
    for row in record["bf16"]:
        band = BANDS[LAYOUTS[row["layout"]].model, row["algorithm"]]
        assert all(row[kind] <= allowed for kind, allowed in band.items()), row
    routed = [row for row in (*record["cells"], *record["bf16"]) if "choices" in row]
    assert {row["dtype"] for row in routed} == {"fp32", "bf16"}
    for dtype, share in {"fp32": OTHER_CHOICES, "bf16": OTHER_CHOICES_BF16}.items():
        assert all(row["other_choices"] <= share * row["choices"] for row in routed if row["dtype"] == dtype)


@pytest.mark.parametrize("table", invariance.TABLES)
def test_the_page_on_invariance_has_the_table(table) -> None:
    page = (ROOT / "docs" / "invariance.md").read_text(encoding="utf-8")
    assert table(invariance.load()) in page, "python -m benchmarks.invariance prints it"


def test_the_page_on_benchmarks_has_the_table_of_messages() -> None:
    page = (ROOT / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    found = json.loads(parallel.RESULT.read_text(encoding="utf-8"))
    assert found["differences"] == parallel.DIFFERENCES
    for part in (parallel.table(found), parallel.reasons()):
        assert part in page, "python -m benchmarks.parallel --markdown prints it"
    for name, layout in found["layouts"].items():
        assert layout["ranks_rehearsed_otherwise"] == 0, name


@pytest.mark.parametrize("table", fits_figures.TABLES)
def test_the_page_on_real_clusters_has_the_table(table) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert table(fits_figures.load()) in page, "python -m benchmarks.rehearsal.fits_figures prints it"


def test_what_the_page_on_real_clusters_lists_fits() -> None:
    for row in fits_figures.load().values():
        assert row["fits"] == (row["peak_gib"] + row["margin_gib"] <= MOST_GIB and not row["refusals"])
        assert row["host_gib_per_node"] <= HOST_MOST_GIB
        assert row["ranks_rehearsed"] > 0


def test_the_table_of_shared_prompts_is_what_was_rehearsed() -> None:
    found = json.loads(prompts.RESULTS.read_text(encoding="utf-8"))
    assert prompts.docs_table(found) in (ROOT / "docs" / "packing.md").read_text(encoding="utf-8")
    assert found["ratios"] == prompts.ratios(found["cases"])
