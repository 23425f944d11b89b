"""A smoke test of `make bench-environments` on a rank that is there already."""

import pytest

from benchmarks import environments


def test_the_benchmark_runs(vllm_ranks, one_layer) -> None:
    """Every conversation has all its turns (asserted there). The least is that of the larger bound."""
    load = environments.SMALL
    found = vllm_ranks.run(1, environments.measure_rank, one_layer["plain"], load, 1)[0]
    summary = environments.summary(found, load)
    assert summary["seconds_waits"] >= load.turns * load.seconds
    assert summary["cost_of_waiting"] == summary["lowest"]

    long = {"none": [9.0], "waits": [12.0], "alone": [0.3]}
    by_work = environments.summary(long, environments.Load())
    assert by_work["seconds_least"] == 11.0
    assert by_work["cost_of_waiting"] == pytest.approx(1.5)
    short = environments.summary({**long, "none": [1.5]}, environments.Load())
    assert short["seconds_least"] == pytest.approx(0.5 + 3 * 2 + 2 * 0.1)
