"""The tables that `python -m benchmarks.faults --markdown` makes. A trial itself: tests/test_resume_killed.py."""

import sys
from pathlib import Path

from benchmarks.faults import __main__ as bench
from benchmarks.faults import page
from benchmarks.faults.record import Result, summary
from tests.refuses import refuses

PAGE = Path(__file__).parents[1] / "docs/reliability.md"
MACHINE = {
    "commit": "abc1234", "command": "make it", "platform": "Linux", "python": "3.11.2", "torch": "2.13.0", "cores": 2,
}  # fmt: skip


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


def test_a_page_without_the_place_of_a_table_is_refused():
    begin, end = "<!-- cost: made by `python -m benchmarks.faults --markdown` -->", "<!-- /cost -->"
    text = f"before\n\n{begin}\n\nold\n\n{end}\n\nafter\n"
    assert page.replaced(text, "cost", ["new"]) == text.replace("old", "new")
    for broken in ("", begin, f"{end} {begin}", text + text):
        with refuses("one line"):
            page.replaced(broken, "cost", [])
