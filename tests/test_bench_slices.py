"""A smoke test of `make bench-slices`: a tiny model, on ranks that are there already. Not covered: that it starts
processes of its own."""

import pytest

from benchmarks import slices
from benchmarks.packing_workload import write_model


def test_the_benchmark_runs(vllm_ranks, tmp_path) -> None:
    """Each response has the length that is given (asserted there); a round's tokens are those of its step."""
    model = write_model(tmp_path / "model", slices.SMALL_MODEL)
    found, _ = vllm_ranks.run(2, slices.measure_rank, model, slices.SMALL, 1)
    summary = slices.summary(found)
    assert list(found) == list(slices.SLICES)
    for count, ((_, tokens),) in found.items():
        assert tokens == sum(slices.lengths_of(slices.SMALL, max(slices.SLICES))), count
    best = summary["milliseconds_per_token"][str(summary["best"])]
    speedup = summary["milliseconds_per_token"]["1"] / best
    assert summary["rollout_speedup_long_tailed"] == pytest.approx(speedup, rel=1e-9)
    assert speedup >= 1


def test_lengths_have_a_long_tail() -> None:
    load = slices.Load()
    lengths = [length for step in range(8) for length in slices.lengths_of(load, step)]
    assert 8 * load.mean < max(lengths) <= load.longest == 12 * load.mean
    assert 0.8 * load.mean < sum(lengths) / len(lengths) < 1.2 * load.mean
    assert sorted(lengths)[len(lengths) // 2] < 0.7 * load.mean
