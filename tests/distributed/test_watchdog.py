"""A reward function that hangs on one of two ranks: both raise together, with status 3 and a report.

In processes of their own: tests/test_hanging_command.py. Not covered: NCCL; several hosts.
"""

from __future__ import annotations

import re
import time

import pytest

from tests.distributed.hanging_run import RULES, hanging_run, line_of


@pytest.mark.parametrize(
    "rule, words",
    [
        ("sleeps", "rank 1: phase 'reward' has passed its limit of 1 s"),
        ("backtracks", "rank 1: phase 'reward' has passed its limit of 1 s"),
        ("slow", "a phase passed its limit on rank 0, 1 and then ended"),
    ],
)
def test_all_ranks_raise_together(rule, words, ranks, one_layer, data, tmp_path) -> None:
    """In a regular expression no thread runs, and a timer of processor time brings the interrupt. What ends by itself
    ends the run at the end of the step. The ranks are well afterwards: they go on with the next test."""
    began = time.monotonic()
    results = ranks.run(2, "command_status", *hanging_run(rule, one_layer, data, tmp_path))
    assert [status for status, _ in results] == [3, 3], results
    assert words in results[0][1]
    assert time.monotonic() - began < 60
    (report,) = (tmp_path / "run/failures/watchdog").glob("*/report.txt")
    assert f"{RULES}:" in report.read_text()
    if rule == "sleeps":
        assert results[0][1].count(words) == 1
        second = report.read_text().splitlines()[1]
        assert re.match(r"  rank 1 on \S+ \(pid \d+\) does not wait for others\. In 'reward': ", second), second
        assert f"{RULES}:{line_of('time.sleep(1000)')} in sleeps: time.sleep(1000)" in second
