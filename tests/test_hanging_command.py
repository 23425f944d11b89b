"""A reward function that hangs on one of two ranks: the command ends with status 3 and says who, where and what.

In processes of its own, as a user starts it; on ranks that are there already: tests/distributed/test_watchdog.py.
Not covered: NCCL; several hosts; ranks that die while the report is made.
"""

import re

import psutil
import pytest

from megarlhf.observe.records.metrics import read_metrics
from tests.command import megarlhf
from tests.distributed.hanging_run import RULES, hanging_run, line_of
from tests.refuses import lines_naming, missing_names


def processes_with(text: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if any(text in part for part in p.info["cmdline"] or [])]


@pytest.mark.parametrize(
    "rule, line",
    [pytest.param("sleeps", "time.sleep(1000)", marks=pytest.mark.slow), ("receives", "dist.recv(torch.zeros(1)")],
)
def test_a_hanging_run_ends_with_status_3_and_a_report(rule, line, one_layer, data, tmp_path) -> None:
    """In a system call rank 1 is interrupted, and both ranks raise together. In a collective nobody can be taken out:
    the rank ends itself after the grace. Nothing is left running, and nothing was logged after step 0."""
    done = megarlhf(*hanging_run(rule, one_layer, data, tmp_path))
    assert done.returncode == 3, done.stderr[-5000:]
    assert processes_with(str(tmp_path)) == []
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0]
    (report,) = (tmp_path / "run/failures/watchdog").glob("*/report.txt")
    assert report.read_text() in done.stderr
    place = f"{RULES}:{line_of(line)} in {rule}: "
    first, second, *_ = report.read_text().splitlines()
    assert re.search(r"phase 'reward' .* \d s on rank \d on \S+; watchdog.reward = 1 s", first)
    assert sorted(path.name for path in report.parent.glob("rank_*")) == ["rank_00000.json", "rank_00001.json"]
    if rule == "sleeps":
        assert not missing_names(second, "rank 1 on", "'reward'", f"{place}time.sleep(1000)")
        assert len(lines_naming(done.stderr, "megarlhf rl: rank 1", "phase 'reward'", "limit of 1 s")) == 1
        assert "Traceback" not in done.stderr
    else:
        assert lines_naming(report.read_text(), "rank 1 on", "in a collective", "'reward'", place.rstrip(": "))
        assert not missing_names(report.read_text(), "not in the same collective")
        assert lines_naming(done.stderr, "4 s", "watchdog.grace")
