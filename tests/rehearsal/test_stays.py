"""Stays in phases: when each begins, and that the last step ends the record. Not covered: a whole rehearsed rank."""

import pytest

from megarlhf.rehearsal.fake_device.ledger import Ledger, merged
from megarlhf.rehearsal.fakes.phases import Steps, StopRehearsal


def test_a_phase_that_is_entered_twice_begins_twice_and_when_it_is_entered():
    """A phase begins when it is entered, and not with its first change of memory."""
    ledger = Ledger(block=1)
    for entered, changed, phase, nbytes in ((1.0, 3.0, "train", 5), (4.0, 4.5, "optimizer", 7), (5.0, 6.0, "train", 9)):
        ledger.seconds = entered
        ledger.enter(1, phase)
        ledger.seconds = changed
        ledger.momentary(nbytes, "buckets")
    ledger.leave()
    train, optimizer = merged(ledger.phases)
    assert (train.begins, optimizer.begins) == ([1.0, 5.0], [4.0])
    assert (train.peak, optimizer.peak) == (9, 7)
    assert train.curve == [(1.0, {}), (3.0, {"buckets": 5}), (3.0, {}), (5.0, {}), (6.0, {"buckets": 9}), (6.0, {})]


def test_on_the_way_out_no_phase_begins():
    moved: list[tuple[int, str]] = []
    ended: list[int] = []
    steps = Steps(1, lambda step, phase: moved.append((step, phase)), ended.append)

    def run():
        with steps.phases(None, None, None, None) as phases:
            phases.begin_step(1)
            with phases("train"):
                pass
            with phases("checkpoint"):
                phases.end_step(1)

    with pytest.raises(StopRehearsal):
        run()
    assert moved == [(1, "train"), (1, "between phases"), (1, "checkpoint")]
    assert ended == [0, 1]
