"""Tables of figures on pages are those of benchmarks/results/. Not covered: figures in sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import invariance
from benchmarks.rehearsal import figures
from tests.docs.repository import ROOT


@pytest.mark.parametrize("table", figures.TABLES)
def test_the_page_on_rehearsals_has_the_table(table: Callable[[dict[str, Any]], str]) -> None:
    page = (ROOT / "docs" / "rehearsal.md").read_text(encoding="utf-8")
    assert table(figures.load()) in page, "python -m benchmarks.rehearsal.figures prints it"


@pytest.mark.parametrize("table", invariance.TABLES)
def test_the_page_on_invariance_has_the_table(table: Callable[[dict[str, Any]], str]) -> None:
    page = (ROOT / "docs" / "invariance.md").read_text(encoding="utf-8")
    assert table(invariance.load()) in page, "python -m benchmarks.invariance prints it"
