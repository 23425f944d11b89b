"""A smoke test of `make bench-rewards`: a tiny model, one round. Its runs are commands on a rank that is there already;
not covered: that they start as processes of their own."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

from benchmarks import slow_rewards
from tests.distributed.jobs import command


def with_delays(runtime, delays, *argv):
    with mock.patch.dict(os.environ, {slow_rewards.DELAYS: delays}):  # of the worker that the run starts
        command(runtime, *argv)


def test_the_benchmark_runs(ranks, tmp_path, monkeypatch):
    started = []

    def run(arguments, env, **options):
        assert arguments[:4] == [sys.executable, "-m", "megarlhf", "rl"]
        started.append(env[slow_rewards.DELAYS])
        ranks.run(1, with_delays, env[slow_rewards.DELAYS], *arguments[3:])
        return subprocess.CompletedProcess(arguments, 0, "", "")

    out = tmp_path / "slow_rewards.json"
    monkeypatch.setattr(slow_rewards, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(sys, "argv", ["slow_rewards", "--small", "--rounds", "1", "--out", str(out)])
    slow_rewards.main()
    result = json.loads(out.read_text())
    assert [float(part) for part in result["by_delay_in_parts"]] == list(slow_rewards.PARTS[1:])
    for found in result["by_delay_in_parts"].values():
        assert found["lowest"] == found["cost"] == found["highest"], "one round"
        assert found["delay_seconds"] > 0
    assert result["seconds_without"] > 0
    assert [len(delays.split(",")) for delays in started] == [1, len(slow_rewards.PARTS)]
