"""A reward function that hangs on one of two ranks: both raise together, with status 3 and a report.

In processes of their own: tests/test_hanging_command.py. Not covered: NCCL; several hosts.
"""

import re
import time

import pytest

from tests.distributed.hanging_run import RULES, hanging_run, line_of
from tests.refuses import lines_naming

LATE = ["rank 1: phase 'reward'", "limit of 1 s"]


@pytest.mark.parametrize(
    "rule, names", [("sleeps", LATE), ("backtracks", LATE), ("slow", ["limit on rank 0, 1", "then ended"])]
)
def test_all_ranks_raise_together(rule, names, ranks, one_layer, data, tmp_path) -> None:
    """In a regular expression no thread runs, and a timer of processor time brings the interrupt. What ends by itself
    ends the run at the end of the step. The ranks are well afterwards: they go on with the next test."""
    began = time.monotonic()
    results = ranks.run(2, "command_status", *hanging_run(rule, one_layer, data, tmp_path))
    assert [status for status, _ in results] == [3, 3], results
    late = lines_naming(results[0][1], *names)
    assert late
    assert time.monotonic() - began < 60
    (report,) = (tmp_path / "run/failures/watchdog").glob("*/report.txt")
    assert f"{RULES}:" in report.read_text()
    if rule == "sleeps":
        assert len(late) == 1
        second = report.read_text().splitlines()[1]
        assert re.match(r"  rank 1 on \S+ \(pid \d+\) .* 'reward'", second), second
        assert f"{RULES}:{line_of('time.sleep(1000)')} in sleeps: time.sleep(1000)" in second
