"""The tables that `python -m benchmarks.faults --markdown` makes. A trial itself: tests/test_resume_killed.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.faults import __main__ as bench
from benchmarks.faults import page
from benchmarks.faults.record import Result, summary

PAGE = Path(__file__).parents[1] / "docs/reliability.md"
MACHINE = {
    "commit": "abc1234",
    "command": "make it",
    "platform": "Linux",
    "python": "3.11.2",
    "torch": "2.13.0",
    "cores": 2,
}
SPREAD = {"median": 0.0512, "least": 0.04, "most": 0.07, "rounds": 8}
COST = {
    **MACHINE,
    "model": {"layers": 8},
    "bytes": {"parameters": 29_400_000, "state": 352_800_000, "written": 353_506_000},
    "written_over_state": 1.002,
    "standing_still_seconds": {"background": SPREAD, "waiting": {**SPREAD, "median": 1.28}},
    "background_over_waiting": 0.04,
    "complete_seconds": {"background": {**SPREAD, "median": 1.5}, "waiting": {**SPREAD, "median": 1.28}},
    "step_beside_a_write_over_step": 1.254,
}


def rows(lines: list[str]) -> dict[str, list[str]]:
    """Cells by the first one."""
    table = [line.strip("| ").split(" | ") for line in lines[2:] if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in table}


def test_the_page_shows_the_newest_results(monkeypatch, tmp_path):
    """If this fails: python -m benchmarks.faults --markdown docs/reliability.md"""
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["faults", "--markdown", str(copy)])
    bench.main()
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
    assert all(title in copy.read_text(encoding="utf-8") for title in page.TITLES.values())


def test_results_stand_in_the_row_of_their_fault():
    """Two trials of which one went wrong; a fault that was skipped; faults without a trial; what is expected of each
    stands there in any case."""
    assert page.TITLES.keys() == bench.FAULTS.keys()
    results = [Result("killed", True, True, steps_lost=2), Result("killed", False, False, steps_lost=3)]
    results[1].beyond_promise = 1
    tried = {
        **MACHINE,
        "faults": {"sigkill_sft": summary(results, "as it says", "nothing")},
        "skipped": {"disk_full": "to mount a file system takes root"},
    }
    found = rows(page.table_of_faults(bench.FAULTS, tried))
    assert len(found) == len(bench.FAULTS)
    again = "the same command goes on and ends with equal metrics"
    assert found[page.TITLES["sigkill_sft"]] == ["2", again, "1", "1 of 2", "3 (2.5)", "1"]
    assert found["the disk is full"][0] == "0: to mount a file system takes root"
    assert found["the disk is full"][2:] == ["…"] * 4
    assert found["NaN in a gradient"][0] == "0"
    untried = rows(page.table_of_faults(bench.FAULTS, None))
    assert untried[page.TITLES["sigkill_sft"]] == ["40", again, "…", "…", "…", "…"]


def test_nothing_compared_is_not_called_equal():
    result = summary([Result("stopped", recovered=False, metrics_equal=None)], "as it says", "nothing")
    found = rows(page.table_of_faults(bench.FAULTS, {**MACHINE, "faults": {"time_limit": result}, "skipped": {}}))
    assert found[page.TITLES["time_limit"]][3] == ""


def test_the_cost_by_its_figures():
    """Without the starts of processes, then with them."""
    found = rows(page.table_of_cost(COST))
    assert found["parameters and optimizer state"] == ["353 MB"]
    assert found["written for a resume point"] == ["354 MB: 1.002 of it"]
    assert found["training stands still, written in the background (default)"] == ["0.051 s (0.04 to 0.07, 8 times)"]
    assert found["time of a step during which a resume point is written"] == ["1.25 of a step without"]
    assert found["the same, resumed run"] == ["…"]
    starts = {"first_step_seconds": {"fresh": SPREAD, "resumed": SPREAD}, "resumed_over_fresh": 1.091}
    assert rows(page.table_of_cost({**COST, **starts}))["resumed over fresh"] == ["1.09"]


def test_only_what_stands_between_the_comments_is_replaced():
    begin, end = "<!-- cost: made by `python -m benchmarks.faults --markdown` -->", "<!-- /cost -->"
    text = f"before\n\n{begin}\n\nold\n\n{end}\n\nafter\n"
    assert page.replaced(text, "cost", ["new"]) == f"before\n\n{begin}\n\nnew\n\n{end}\n\nafter\n"
    faults = text.replace("cost", "faults")
    whole = page.filled(faults + text, bench.FAULTS, None, COST)
    assert "commit abc1234; 2 cores" in whole
    assert "Not run yet: `make test-faults`." in whole
    for broken in ("", begin, f"{end} {begin}", text + text):
        with pytest.raises(ValueError, match="needs one line"):
            page.replaced(broken, "cost", [])
