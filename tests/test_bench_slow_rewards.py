"""A smoke test of `make bench-rewards`: a tiny model, one round."""

import json

from benchmarks.slow_rewards import PARTS
from tests.command import python


def test_the_benchmark_runs(tmp_path):
    out = tmp_path / "slow_rewards.json"
    done = python("-m", "benchmarks.slow_rewards", "--small", "--rounds", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert [float(part) for part in result["by_delay_in_parts"]] == list(PARTS[1:])
    for found in result["by_delay_in_parts"].values():
        assert found["lowest"] == found["cost"] == found["highest"], "one round"
        assert found["delay_seconds"] > 0
    assert result["seconds_without"] > 0
