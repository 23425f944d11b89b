"""Tables of samples as files and as Markdown. In a report: test_report.py. A run's: distributed/test_shown.py."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from megarlhf.observe.records.run_directory import files_of_a_run
from megarlhf.observe.records.sample_tables import (
    SampleTables,
    ShownTables,
    as_markdown,
    columns_and_cells,
    describe_sample,
    read_shown,
    read_table,
    spread,
    steps_of,
)
from tests.refuses import refuses

NASTY = '</pre><script>alert("x")</script>\n# no heading & no *emphasis*'


def row(step: int, sample: int = 0, **changes: Any) -> dict[str, Any]:
    made = {"step": step, "sample": sample, "prompt": f"{sample}+1=", "answer": "7", "response": f"at {step}"}
    return {**made, "length": 2, "finished": True, "reward": 0.5, "rewards": {"a": 1.0, "b": None}, **changes}


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "samples").iterdir())


@pytest.mark.parametrize(
    ("count", "total", "expected"),
    [(3, 16, [0, 5, 10]), (4, 4, [0, 1, 2, 3]), (9, 2, [0, 1]), (0, 5, []), (3, 0, []), (3, -1, [])],
)
def test_the_choice_is_even_and_always_the_same(count, total, expected) -> None:
    assert spread(count, total) == expected


def test_a_table_is_strict_json_lines_and_read_back(tmp_path) -> None:
    rows = [row(5, 0, response=NASTY), row(5, 1, kl=0.25)]
    SampleTables(tmp_path).write("eval", 5, rows)
    assert names(tmp_path) == ["eval_step_000005.jsonl"]
    assert read_table(tmp_path, "eval", 5) == rows
    assert (steps_of(tmp_path, "eval"), steps_of(tmp_path, "train")) == ([5], [])
    (tmp_path / "samples/eval_step_000005.jsonl").write_text("{")
    with refuses("eval_step_000005.jsonl", "table of samples"):
        read_shown(tmp_path)


def test_a_resume_removes_the_tables_of_later_steps_and_nothing_else(tmp_path) -> None:
    tables = SampleTables(tmp_path)
    for step in (0, 10, 20):
        tables.write("eval", step, [row(step)])
        tables.write("train", step + 5, [row(step + 5)])
    for name in ("notes.txt", "step_9.txt", ".step_000009.jsonl.partial"):
        (tmp_path / "samples" / name).write_text("mine")
    SampleTables(tmp_path, resume_step=10)
    kept = ["eval_step_000000.jsonl", "eval_step_000010.jsonl", "notes.txt", "step_000005.jsonl", "step_9.txt"]
    assert names(tmp_path) == kept
    SampleTables(tmp_path, resume_step=-1)
    assert names(tmp_path) == ["notes.txt", "step_9.txt"]


def test_overwrite_knows_them(tmp_path) -> None:
    tables = SampleTables(tmp_path)
    tables.write("eval", 0, [row(0)])
    tables.write("train", 1, [row(1)])
    (tmp_path / "samples/mine.jsonl").write_text("")
    assert [path.name for path in files_of_a_run(tmp_path)] == ["step_000001.jsonl", "eval_step_000000.jsonl"]


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path, monkeypatch, caplog) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tables = SampleTables(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        tables.write("train", 1, [row(1)])
        tables.write("train", 2, [row(2)])
    assert steps_of(tmp_path, "train") == []
    assert "2 tables" in caplog.records[-1].getMessage()
    tables.flush()
    assert names(tmp_path) == ["step_000001.jsonl", "step_000002.jsonl"]


def test_a_sample_in_words_as_markdown_and_as_a_flat_table() -> None:
    """What was said stands indented in Markdown, where no mark-up is read."""
    shown = row(3, 2, response=NASTY, finished=False, kl=0.125)
    assert describe_sample(shown) == "reward 0.5, a 1, b -, kl 0.125, length 2, cut at the limit"
    script, heading = NASTY.splitlines()
    assert as_markdown([shown]) == (
        f"**sample 2**: {describe_sample(shown)}\n\n    2+1=\n\nresponse:\n\n    {script}\n    {heading}"
    )
    columns, ((*cells,),) = columns_and_cells([shown])
    assert dict(zip(columns, cells, strict=True)) == {
        **{name: value for name, value in shown.items() if name != "rewards"},
        "reward/a": 1.0,
        "reward/b": None,
    }


def test_a_report_reads_the_first_evaluations_the_latest_and_two_between(tmp_path) -> None:
    tables = SampleTables(tmp_path)
    for step in range(0, 100, 10):
        tables.write("eval", step, [row(step)])
        tables.write("train", step + 1, [row(step + 1)])
    chosen = read_shown(tmp_path)
    assert (list(chosen.evaluations), list(chosen.training)) == ([0, 30, 60, 90], [91])
    assert read_shown(tmp_path / "absent") == ShownTables()


def test_rows_are_one_object_a_line(tmp_path) -> None:
    SampleTables(tmp_path).write("train", 1, [row(1, 0, response="a\nb\u2028c"), row(1, 1)])
    lines = (tmp_path / "samples/step_000001.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["sample"] for line in lines[:-1]] == [0, 1]
    assert len(read_table(tmp_path, "train", 1)) == 2
