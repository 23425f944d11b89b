"""Lengths that a run keeps by step: cut back as metrics are, and written when there is room.

Not covered: a run that is killed (tests/distributed/test_shown.py); metrics and tables (files of their own).
"""

import json
import os
from pathlib import Path
from typing import Any

from megarlhf.observe.records import jsonl
from megarlhf.observe.records.jsonl import read_lines
from megarlhf.observe.records.step_records import LENGTHS_FILE, open_records, require_readable_records
from megarlhf.rehearsal.fakes.lengths import Given, parse_lengths
from tests.refuses import missing_names, refuses


def keep(run: Path, steps: dict[int, list[int]], resume_step: int | None = None) -> None:
    with open_records(run, resume_step, None, lengths=True) as records:
        for step, responses in steps.items():
            records.keep_lengths(step, [5] * len(responses), responses)


def kept(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / LENGTHS_FILE).read_text().splitlines()]


def test_a_step_stands_once_after_a_resume_and_a_rehearsal_reads_the_file(tmp_path) -> None:
    """Of steps 2 and 3 the resumed run makes other samples; the last line was torn."""
    keep(tmp_path, {1: [7, 8], 2: [100], 3: [100]})
    with (tmp_path / LENGTHS_FILE).open("a") as file:
        file.write('{"step": 4, "prom')
    keep(tmp_path, {2: [9], 3: [10, 11]}, resume_step=1)
    assert kept(tmp_path) == [
        {"step": 1, "prompts": [5, 5], "responses": [7, 8]},
        {"step": 2, "prompts": [5], "responses": [9]},
        {"step": 3, "prompts": [5, 5], "responses": [10, 11]},
    ]
    drawn = parse_lengths(str(tmp_path))
    assert isinstance(drawn, Given)
    assert list(drawn.values) == [7, 8, 9, 10, 11]
    with refuses("lengths.jsonl", "step 3", "resume_step"):
        keep(tmp_path, {3: [1]}, resume_step=3)
    keep(tmp_path, {}, resume_step=-1)
    assert kept(tmp_path) == []


def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path) -> None:
    keep(tmp_path, {1: [7], 2: [8]})
    text = "no json\n" + (tmp_path / LENGTHS_FILE).read_text()
    (tmp_path / LENGTHS_FILE).write_text(text)
    with refuses("lengths.jsonl, line 1", "b'no json'", "JSON"):
        require_readable_records(tmp_path)
    assert (tmp_path / LENGTHS_FILE).read_text() == text


def test_a_line_that_has_no_room_waits_until_a_resume_point_is_written(tmp_path, monkeypatch, caplog) -> None:
    """What a resume point waits for is `Records.flush`."""

    def full(*arguments: Any) -> int:
        raise OSError("no room")

    with open_records(tmp_path, None, None, lengths=True) as records:
        records.keep_lengths(1, [1], [2])
        with monkeypatch.context() as patched:
            patched.setattr(jsonl.os, "write", full)
            records.keep_lengths(2, [3], [4])
        assert [row["step"] for row in kept(tmp_path)] == [1]
        assert not missing_names(caplog.text, "lengths.jsonl", "bytes", "no room")
        assert jsonl.os.write is os.write
        records.flush()
        assert [row["responses"] for row in kept(tmp_path)] == [[2], [4]]


def test_only_a_run_whose_samples_have_lengths_writes_the_file(tmp_path) -> None:
    with open_records(tmp_path, None, None, lengths=False) as records:
        records.metrics.log(1, {"loss": 1.0})
        records.flush()
    assert not (tmp_path / LENGTHS_FILE).exists()
    require_readable_records(tmp_path)
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]
