"""The tables that `python -m benchmarks.faults --markdown` makes. A trial itself: tests/test_resume_killed.py."""

import asyncio
import sys
from pathlib import Path

from benchmarks.faults import __main__ as bench
from benchmarks.faults import page
from benchmarks.faults.bank_records import read_bank
from benchmarks.faults.environments import FAULT_FILE, Hints, take_fault
from benchmarks.faults.record import Result, summary
from benchmarks.faults.runs import differences
from megarlhf import Answer
from megarlhf.rollout.bank_lines import line_of
from megarlhf.rollout.environments.answer import Turn
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


# --- conversations --------------------------------------------------------------------------------


def test_metrics_that_may_differ_are_named():
    """In metrics and TensorBoard's numbers; weights are always compared."""
    got = {
        "metrics": [{"step": 1, "loss": 0.1, "logprob_gap_max": 1e-6}],
        "scalars": {"loss": [[1, 0.1]], "logprob_gap_max": [[1, 1e-6]]},
        "weights": {"a": "1"},
        "finished": {"step": 1},
    }
    other_gap = {
        **got,
        "metrics": [{"step": 1, "loss": 0.1, "logprob_gap_max": 2e-6}],
        "scalars": {"loss": [[1, 0.1]], "logprob_gap_max": [[1, 2e-6]]},
    }
    assert "logprob_gap_max" in differences(other_gap, got)
    assert "logprob_gap_max" in differences(other_gap, got, ["correction"])
    assert not differences(other_gap, got, ["gap", "correction"])
    assert "loss" in differences({**got, "metrics": [{"step": 1, "loss": 0.2}]}, got, ["gap"])
    assert "weights" in differences({**other_gap, "weights": {"a": "2"}}, got, ["gap"])


def turn_record(row, turn, *, first_has_tokens=False, **more):
    """Record of an answered turn; the first is the answer of `reset`, which has no tokens."""
    return {"row": row, "seed": 100 + row, "turn": turn, "tokens": "AA==" if turn or first_has_tokens else "", **more}


def test_unfinished_conversations_are_read_from_the_bank(tmp_path):
    """Row 0 is over, row 1 has a third turn, row 2 began anew after two, row 3 is in its last slice and row 4 in an
    earlier one; the last line of a file may be incomplete."""
    folder = tmp_path / "bank/step_000004"
    folder.mkdir(parents=True)
    records = [
        {"format": 2, "step": 4},
        *(turn_record(row, turn) for row in (0, 1) for turn in range(4)),
        {"row": 0, "seed": 100, "finished": True},
        *(turn_record(2, turn) for turn in (0, 1, 2, 0, 1)),
        turn_record(3, 0, first_has_tokens=True),
        turn_record(4, 0, first_has_tokens=True, until=20),
    ]
    content = b"".join(map(line_of, records))
    (folder / "0001_rank_00000.jsonl").write_bytes(content + line_of({"row": 5, "seed": 105})[:-2])
    bank = read_bank(tmp_path)
    assert bank.finished == {5: 1}
    assert bank.num_open == {5: 4}
    answered = {talk.seed: (talk.num_answered, talk.has_third_turn) for talk in bank.conversations}
    assert answered == {101: (3, True), 102: (1, False), 103: (1, True), 104: (1, False)}
    assert bank.third_turns == 2
    (tmp_path / "bank/step_000005").mkdir()
    assert not read_bank(tmp_path, newest=True).conversations


def hints(seed: int, texts: str) -> list[Answer]:
    """Answers of the environment to turns of one character each."""

    async def talk() -> list[Answer]:
        environment = Hints(seconds=0.0)
        environment.reset({"prompt": "37+48=", "answer": "85"}, seed)
        return [await environment.step(Turn(text, n, True, False)) for n, text in enumerate(texts)]

    return asyncio.run(talk())


def test_conversations_have_three_to_five_turns():
    """Rewards are the share of right digits; a turn's text is a digit here."""
    assert [answer.done for answer in hints(0, "812")] == [False, False, True]
    assert [answer.done for answer in hints(3, "81234")] == [False] * 5
    assert [answer.reward for answer in hints(3, "8999")] == [0.5, 0.0, 0.0, 0.0]
    assert all(2 <= len(answer.messages) <= 4 for answer in hints(3, "01234"))


def test_an_environment_fails_once_and_where_it_is_said(monkeypatch, tmp_path):
    file = tmp_path / "fault"
    monkeypatch.setenv(FAULT_FILE, str(file))
    assert not take_fault(7, 1)
    file.write_text("answers_otherwise 7 1")
    assert [take_fault(*place) for place in ((7, 0), (8, 1))] == ["", ""]
    otherwise, usual = ([answer.messages for answer in hints(7, "123")] for _ in range(2))
    assert [otherwise[n] == usual[n] for n in range(3)] == [True, False, True]
    file.write_text("exits")
    assert [take_fault(1, 1) for _ in range(2)] == ["exits", ""]
    assert file.with_name("fault.happened").exists()


def test_conversations_that_went_on_are_counted():
    results = [Result("killed", True, True, notes={"conversations": number}) for number in (0, 5, 7)]
    of = summary(results, "as it says", "nothing")
    assert of["conversations"] == {"went_on": 12, "trials": 2}
    assert "conversations" not in summary([Result("killed", True, True)], "as it says", "nothing")
    text = " ".join(page.about_conversations({**MACHINE, "faults": {"sigkill_third_turn": of}, "skipped": {}}))
    assert "12 conversations" in text
    assert "2 trials" in text
    assert page.about_conversations(None) == []
