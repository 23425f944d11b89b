"""Seconds by phase, on a clock that the test turns."""

import math

import pytest

from megarlhf.observe.watch.phases import Phases, seconds_of
from tests.refuses import refuses


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_inner_phases_are_not_counted_in_the_outer_and_entries_add_up(clock):
    """reward 1 + 2, with 4 of a model's scores inside; rollout 8 twice."""
    phases = Phases(clock)
    with phases("reward"):
        clock.now += 1
        with phases("score/reward_model"):
            clock.now += 4
            assert [phase.name for phase in phases.open] == ["reward", "score/reward_model"]
        clock.now += 2
    for _ in range(2):
        clock.now += 1000  # between phases
        with phases("rollout"):
            clock.now += 8
    assert phases.lap() == {"reward": 3, "score/reward_model": 4, "rollout": 16}
    assert phases.lap() == {}
    assert phases.open == ()


def test_a_step_has_the_seconds_between_its_begin_and_its_end(clock):
    """Building before the first step, and saving between two, belong to none."""
    phases = Phases(clock)

    def spend(name, seconds):
        with phases(name):
            clock.now += seconds
        return phases.step

    assert spend("build", 9) is None
    for step in (3, 4):
        phases.begin_step(step)
        assert spend("rollout", step) == step
        assert phases.end_step(step) == {"rollout": step}
        assert spend("checkpoint", 5) is None


def test_a_phase_ends_with_the_error_that_leaves_it(clock):
    phases = Phases(clock)

    def fail():
        with phases("rollout"), phases("eval"):
            clock.now += 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert phases.open == ()
    assert phases.lap() == {"eval": 2, "rollout": 0}


def test_unknown_phases_list_the_known_ones(clock):
    with refuses("'sleep'", "build", "rollout", "checkpoint"):
        Phases(clock)("sleep").__enter__()


def test_the_old_metrics_are_sums_and_absent_where_nothing_was_done():
    seconds = {"rollout": 1.0, "reward": 2.0, "score/actor": 4.0, "score/critic": 8.0, "advantages": 16.0}
    seconds |= {"train/actor": 32.0, "optimizer/actor": 64.0, "optimizer/critic": 128.0, "reshard": 256.0, "eval": 0.5}
    assert seconds_of(seconds) == {
        "seconds_rollout": 1.0, "seconds_experience": 30.0, "seconds_train": 224.0, "seconds_reshard": 256.0,
    }  # fmt: skip


def test_own_seconds_are_told_at_the_end_of_a_step_by_phase_and_then_forgotten(clock):
    told = []

    class Sharing:
        def end_step(self, step, local_seconds):
            told.append((step, dict(local_seconds)))

    phases = Phases(clock)
    phases.sharing = Sharing()
    with phases("reward"):
        for _ in range(2):
            with phases.local():
                clock.now += 3
            clock.now += 5  # waiting
    with phases("rollout"):
        phases.add_local(0.5)
    assert phases.end_step(7) == {"reward": 16, "rollout": 0}
    phases.end_step(8)
    assert told == [(7, {"reward": 6, "rollout": 0.5}), (8, {})]


def test_tokens_per_second_by_hand():
    """60 tokens in 3 s of sampling; 100 + 20 in 4 s of training and 1 s of its optimizer. Unknown tokens, tokens of a
    phase that was not entered, and none are no rate."""
    now = [0.0]
    phases = Phases(clock=lambda: now[0])

    def spend(phase, seconds):
        with phases(phase):
            now[0] += seconds

    for phase, seconds in (("rollout", 3), ("train/actor", 4), ("optimizer/actor", 1), ("eval", 50)):
        spend(phase, seconds)
    phases.count("rollout_tokens_per_second", 60)
    phases.count("tokens_per_second", 100)
    phases.count("tokens_per_second", 20)
    assert phases.rates() == {"rollout_tokens_per_second": 20.0, "tokens_per_second": 24.0}
    phases.end_step(1)
    assert phases.rates() == {}
    spend("rollout", 2)
    phases.count("rollout_tokens_per_second", math.nan)
    phases.count("rollout_tokens_per_second", 7)
    phases.count("tokens_per_second", 5)
    assert phases.rates() == {}
    with refuses("'speed'", error=AssertionError):
        phases.count("speed", 1)
