"""A smoke test of `make bench-resume`: a tiny model, one round. Not covered: the starts of processes."""

import json

import pytest

from tests.apart import run_module


def test_the_benchmark_runs(tmp_path):
    out = tmp_path / "resume.json"
    done = run_module("benchmarks.resume", "--small", "--rounds", "1", "--starts", "0", "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    still = {way: found["median"] for way, found in result["standing_still_seconds"].items()}
    assert result["background_over_waiting"] == pytest.approx(still["background"] / still["waiting"])
    size = result["bytes"]
    assert size["state"] == 12 * size["parameters"], "fp32: the parameter and Adam's two moments"
    assert size["state"] < size["written"] == pytest.approx(result["written_over_state"] * size["state"])
