"""A smoke test of `make bench-data`. Not covered: the parts that start processes, and what the figures are."""

import json

from tests.apart import run_module


def test_the_benchmark_runs(tmp_path):
    out = tmp_path / "data.json"
    small = ["--small", "--rounds", "1", "--records", "50", "--many", "600", "--out", str(out)]
    done = run_module("benchmarks.data", *small, "--parts", "first_batch", "conversations")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["first_batch"]["samples"] == 600
    assert set(result["conversations"]["with_over_without"]) == {"short", "looks_for_thoughts"}
