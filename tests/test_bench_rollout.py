"""A smoke test of `make bench-rollout`: a tiny model, one round, on ranks that are there already; not covered: that it
starts processes of its own."""

import pytest

from benchmarks import rollout
from benchmarks.packing_workload import write_model


def test_the_benchmark_runs(vllm_ranks, tmp_path) -> None:
    """Each row has the length that is given (asserted there)."""
    model = write_model(tmp_path / "model", rollout.SMALL_MODEL)
    found, _ = vllm_ranks.run(2, rollout.measure_rank, model, rollout.SMALL, 1)
    ways = rollout.summary(found)
    assert ways.keys() == rollout.WAYS.keys()
    assert ways["fixed"]["over_fixed"] == ways["fixed"]["lowest"] == ways["fixed"]["highest"] == 1.0
    for way, each in ways.items():
        assert each["over_fixed"] * ways["fixed"]["seconds"] == pytest.approx(each["seconds"]), way
        assert 0 <= each["idle_fraction"] < 1


def test_lengths_have_a_long_tail_and_are_alike_for_a_prompt() -> None:
    load = rollout.Load()
    first, second = (rollout.lengths_of(load, number) for number in (1, 2))
    assert first == rollout.lengths_of(load, 1) != second
    assert max(first) > 4 * sum(first) / len(first)
    means = [sum(first[n : n + load.per_prompt]) / load.per_prompt for n in range(0, len(first), load.per_prompt)]
    again = [sum(second[n : n + load.per_prompt]) / load.per_prompt for n in range(0, len(first), load.per_prompt)]
    assert all(0.3 < a / b < 3 for a, b in zip(means, again, strict=True))
