"""Which rank is named as slow, from seconds written out. What is measured: tests/distributed/test_stragglers.py."""

from statistics import median

import torch

from megarlhf.config import StragglersConfig
from megarlhf.observe.watch.stragglers import Stragglers, medians_of_others, probe_seconds
from tests.refuses import missing_names


def watch(rows, **cfg):
    """What is said in each step."""
    stragglers = Stragglers(StragglersConfig(**{"steps": 3, **cfg}), ["n1", "n1", "n2", "n2"])
    return [stragglers.watch(step, row) for step, row in enumerate(rows, start=1)]


def test_a_rank_is_named_with_host_and_phase_after_so_many_steps_in_a_row():
    slow, even = {"reward": [2, 2, 2, 4]}, {"reward": [2, 2, 2, 2.9]}
    said = watch([slow, slow, even, slow, slow, slow, slow])
    assert [len(sentences) for sentences in said] == [0, 0, 0, 0, 0, 1, 0], "an even step in between starts anew"
    assert missing_names(said[5][0], "rank 3 on n2", "'reward'", "4 s", "3 others", "2 s", "3 times") == []


def test_it_is_said_again_only_after_a_while():
    said = watch([{"rollout": [9, 2, 2, 2]}] * 9, repeat_after=5)
    assert [n for n, sentences in enumerate(said, start=1) if sentences] == [3, 8]


def test_what_takes_no_time_is_no_straggler_but_a_probe_is():
    """1 ms against 5 ms: of a phase nothing, of the probe all."""
    rows = [{"reward": [0.001, 0.001, 0.001, 0.005], "probe": [0.001, 0.001, 0.005, 0.001]}] * 3
    said = watch(rows)
    assert [len(sentences) for sentences in said] == [0, 0, 1]
    assert missing_names(said[2][0], "rank 2 on n2", "probe") == []


def test_steps_without_the_work_neither_count_nor_reset():
    """The probe runs every so many steps only."""
    none, slow = {"probe": [0, 0, 0, 0]}, {"probe": [1, 1, 1, 2]}
    assert [len(s) for s in watch([slow, none, none, slow, none, slow])] == [0, 0, 0, 0, 0, 1]


def test_the_probe_takes_time_and_no_random_number():
    state = torch.get_rng_state()
    assert 0 < probe_seconds(torch.device("cpu")) < 5
    assert torch.equal(state, torch.get_rng_state())


def test_a_rank_is_compared_with_the_others_also_where_there_are_two():
    """The median of two ranks would be their mean, which no rank exceeds by a factor of two."""
    stragglers = Stragglers(StragglersConfig(steps=1), ["n1", "n2"])
    assert len(stragglers.watch(1, {"reward": [2.0, 4.0]})) == 1
    assert stragglers.watch(2, {"reward": [2.0, 2.9]}) == []
    assert Stragglers(StragglersConfig(steps=1), ["n1"]).watch(1, {"reward": [9.0]}) == []
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    for count in range(2, 8):
        some = values[:count]
        assert medians_of_others(some) == [median(some[:n] + some[n + 1 :]) for n in range(count)]
