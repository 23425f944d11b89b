"""Rollouts that are cut off and go on, and engines that fail: the responses are those of an undisturbed rollout.

Bit for bit, on a CPU. Not covered: GPUs, where the bits depend on which requests are in a batch; a rank that
fails between two collectives of an engine of several ranks, which leaves the others waiting in it.
"""

from typing import Any

import pytest

from tests.distributed import rollout_jobs

ALL = list(range(len(rollout_jobs.PROMPTS)))


def _check(ranks: list[dict[str, Any]], limits: list[int]) -> None:
    for seen in ranks:
        assert seen == ranks[0]
    whole = seen["whole"]
    lengths = [len(tokens) for tokens, _, _ in whole]
    assert min(lengths) < max(lengths), "all end at once: nothing would be cut off"
    assert seen["alone"] == whole, "the bits depend on the requests beside"
    assert seen["again"] == seen["clean"] == seen["continued"] == seen["from_bank"] == whole
    taken = 0
    drawn: list[int] = []
    for number, (taken_over, rows) in enumerate(seen["added"]):
        assert taken_over == taken == len(drawn)
        taken += len(rows)
        drawn += rows
        if number < len(limits):
            assert limits[number] <= len(rows) < len(ALL)
            assert seen["interrupted"][number] == (taken, len(ALL))
    assert sorted(drawn) == ALL, "a row was drawn twice or never"
    assert seen["group"], "closing the engine has destroyed the run's process group"


@pytest.mark.parametrize(("tp", "dtype"), [(1, "fp32"), (2, "bf16")])
def test_a_rollout_that_is_cut_off_goes_on_where_it_was(tp, dtype, vllm_ranks, two_layers, tmp_path) -> None:
    """Two engines of one rank, and one of two: cut off twice by rank 0 alone; no row is drawn twice, and tokens and
    log-probs are those of the whole rollout. Then one rank goes on with the bank of two."""
    model, folder, limits = str(two_layers["plain"]), str(tmp_path / "bank"), [1, 2]
    ranks = vllm_ranks.run(2, rollout_jobs.cut_off_and_continued, model, "vllm", tp, {"tp": 2}, dtype, folder, limits)
    _check(ranks, limits)
    if tp == 1:
        for path in sorted((tmp_path / "bank").glob("*/*rank_00001.jsonl"))[:1]:
            lost = len(path.read_text().splitlines()) - 1
            path.unlink()
        ((rows, taken_over, added),) = vllm_ranks.run(1, rollout_jobs.continued, model, "vllm", 1, {}, folder)
        assert rows == ranks[0]["whole"]
        assert (taken_over, len(added)) == (len(ALL) - lost, lost)
        assert lost > 0


def test_a_rollout_with_the_actor_itself_goes_on_where_it_was(ranks, two_layers, tmp_path) -> None:
    """The engine `megatron`, two data-parallel ranks of two stages."""
    model, folder = str(two_layers["plain"]), str(tmp_path / "bank")
    results = ranks.run(4, rollout_jobs.cut_off_and_continued, model, "megatron", 1, {"pp": 2}, "fp32", folder, [1, 1])
    _check(results, [1, 1])


def test_rows_that_have_ended_are_run_no_further(ranks, two_layers) -> None:
    """A micro-batch of two goes on for as long as the longer of its responses."""
    ((lengths, forwards),) = ranks.run(1, rollout_jobs.forwards_of_a_rollout, str(two_layers["plain"]))
    pairs = list(zip(lengths[::2], lengths[1::2], strict=True))
    assert forwards == sum(map(max, pairs)) < len(pairs) * rollout_jobs.SAMPLING.max_tokens


FAULTS: dict[int, list[tuple[str, tuple[int, ...], int]]] = {
    1: [("step", (1,), 7), ("forward", (0,), 5), ("forward", (0, 1), 4)],
    2: [("step", (1,), 7), ("forward", (0, 1), 6)],
}
"""By tp: where, on which ranks, at which call. At tp = 2 a forward has collectives inside, so it fails on both."""


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_that_fails_is_built_anew_and_nothing_finished_is_drawn_again(tp, vllm_ranks, two_layers) -> None:
    """Exceptions in vLLM's step and in the model's forward, on one rank or both: the results are the undisturbed ones,
    on all ranks, and the old engine's weights and cache are freed before the new one is made."""
    results = vllm_ranks.run(2, rollout_jobs.engine_failures, str(two_layers["plain"]), tp, {"tp": 2}, FAULTS[tp])
    for seen in results:
        assert all(rows == results[0]["whole"] for rows in seen["rows"])
        assert seen["rebuilds"] == list(range(1, len(FAULTS[tp]) + 1))
        assert seen["sum"] == 2.0
    engines = 2 // tp
    for number in range(len(FAULTS[tp])):
        first, second = ([seen["drawn"][number][attempt] for seen in results[::tp]] for attempt in (0, 1))
        assert sum(first) <= len(ALL), "both may fail before all are taken from their queue"
        assert len(first) == engines
        assert sum(second) in range(1, len(ALL)), "nothing was finished before the fault"
