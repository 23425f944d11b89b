"""Traces run together: times by hand.

Not covered: prices (all are made up here), where traces come from, and faults (test_replay_faults.py).
"""

import random
import time
from dataclasses import replace

import pytest

from megarlhf.rehearsal.timeline.simulate import replay
from megarlhf.rehearsal.timeline.trace import Collective
from tests.rehearsal.traces import Prices, Writer, bubble, run, times


def test_two_ranks_and_one_all_reduce():
    """Rank 0 is there at 1 s, rank 1 at 3 s, the transfer takes .5 s: both go on at 3.5 s. Rank 0 has waited 2 s for
    the other and .5 s for the transfer. Not covered: groups of more than two."""
    traces = {0: Writer().compute(1.0), 1: Writer().compute(2.0).compute(1.0, "memory")}
    for writer in traces.values():
        writer.collective([0, 1], 8).compute(0.25)
    price = Prices(collective=0.0625)
    replayed = run(traces, price, label=lambda ranks: "data" if ranks == (0, 1) else "?")
    replayed.check()
    assert replayed.ends == {0: 3.75, 1: 3.75}
    assert price.asked == [("all_reduce", (0, 1), 8, False)]

    early, late = times(replayed, 0), times(replayed, 1)
    assert early.compute == {"matmul": 1.25}
    assert late.compute == {"matmul": 2.25, "memory": 1.0}
    row = early.communication["all_reduce", "data"]
    assert (row.count, row.nbytes, row.seconds) == (1, 8, 0.5)
    assert (row.idle, row.queued, row.transfer) == (2.0, 0.0, 0.5)
    row = late.communication["all_reduce", "data"]
    assert (row.idle, row.queued, row.transfer) == (0.0, 0.0, 0.5)
    phase = replayed.steps[0].phases["train/actor"]
    assert phase.seconds() == 3.75
    assert bubble(phase) == 1 - (1.25 + 3.25) / 7.5


@pytest.mark.parametrize(("computing", "exposed"), [(0.25, 0.75), (1.0, 0.0), (4.0, 0.0)])
def test_a_collective_runs_beside_computing(computing, exposed):
    """1 s of transfer from 0 s on, and so much computing before the wait: the wait takes what is left. Not covered:
    that computing beside a transfer is slower."""
    writers = {rank: Writer().collective([0, 1], 4, wait=False).compute(computing).wait(1) for rank in (0, 1)}
    replayed = run(writers, Prices(collective=0.25))
    replayed.check()
    assert replayed.ends[0] == computing + exposed
    row = times(replayed, 0).communication["all_reduce", "2 ranks"]
    assert (row.seconds, row.transfer, row.idle, row.queued) == (1.0, exposed, 0.0, 0.0)


def test_a_group_runs_one_after_the_other_and_groups_beside_each_other():
    """Two collectives of 1 s in one group, one more in another: the second of the group ends at 2 s, the other group's
    at 1 s. Not covered: that they share wires."""
    writers = {}
    for rank in (0, 1):
        writers[rank] = Writer()
        writers[rank].collective([0, 1], 1, wait=False).collective([0, 1], 1, wait=False)
        writers[rank].collective([0, 1], 1, wait=False, host=True).wait(3).wait(2).wait(2).wait(1)
    replayed = run(writers, Prices(collective=1.0), label=lambda ranks: "data")
    replayed.check()
    assert replayed.ends == {0: 2.0, 1: 2.0}
    row = times(replayed, 0).communication["all_reduce", "data"]
    assert (row.count, row.seconds) == (3, 3.0)
    assert (row.queued, row.transfer) == (0.0, 2.0)

    writers = {rank: Writer() for rank in (0, 1)}
    for writer in writers.values():
        writer.collective([0, 1], 1, wait=False).collective([0, 1], 1)
    replayed = run(writers, Prices(collective=1.0))
    row = times(replayed, 1).communication["all_reduce", "2 ranks"]
    assert (row.idle, row.queued, row.transfer) == (0.0, 1.0, 1.0)


def test_messages_meet_and_small_ones_leave_at_once():
    """A sender's wait ends when the message has arrived, 1 s after the receiver came at 2 s; one of no bytes is gone
    at once. Issuing never blocks. Not covered: messages that a network buffers."""
    sender = Writer().send(1, 4, wait=False).compute(0.5).send(1, 0).wait(1).compute(0.125)
    receiver = Writer().compute(2.0).receive(0, 4).receive(0, 0)
    replayed = run({0: sender, 1: receiver}, Prices(message=0.25))
    replayed.check()
    assert replayed.ends == {0: 3.125, 1: 3.0}
    row = times(replayed, 0).communication["send", "2 ranks"]
    assert (row.count, row.idle, row.transfer) == (2, 1.5, 1.0)
    row = times(replayed, 1).communication["receive", "2 ranks"]
    assert (row.count, row.idle, row.transfer) == (2, 0.0, 1.0)


def one_forward_one_backward(stage, stages, micro_batches, forward=1.0, backward=1.0):
    """What Megatron's schedule issues without interleaving; an exchange of both directions waits for both."""
    group = range(stages)
    trace = Writer()

    def exchange(*calls):
        numbers = []
        for kind, peer in calls:
            if 0 <= peer < stages:
                getattr(trace, kind)(peer, 8, wait=False, ranks=group)
                numbers.append(trace.number)
        for number in numbers:
            trace.wait(number)

    warmup = min(stages - stage - 1, micro_batches)
    for _ in range(warmup):
        exchange(("receive", stage - 1))
        trace.compute(forward)
        exchange(("send", stage + 1))
    steady = micro_batches - warmup
    if steady:
        exchange(("receive", stage - 1))
    for number in range(steady):
        trace.compute(forward)
        exchange(("send", stage + 1), ("receive", stage + 1))
        trace.compute(backward)
        if number == steady - 1:
            exchange(("send", stage - 1))
        else:
            exchange(("send", stage - 1), ("receive", stage - 1))
    for _ in range(warmup):
        exchange(("receive", stage + 1))
        trace.compute(backward)
        exchange(("send", stage - 1))
    return trace


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8, 29])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_bubble_of_one_forward_one_backward(stages, micro_batches):
    """Free messages, equal stages: (p - 1) / (m + p - 1) of the time is bubble (Narayanan et al. 2021, section 2.2, as
    a share of the whole). Not covered: interleaved schedules; messages that cost something; backward
    passes that take longer, where the exchanges' sends wait too."""
    traces = {stage: one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)}
    replayed = run(traces)
    replayed.check()
    phase = replayed.steps[0].phases["train/actor"]
    rounds = micro_batches + stages - 1
    assert phase.seconds() == 2 * rounds
    assert bubble(phase) == pytest.approx((stages - 1) / rounds, rel=1e-12, abs=1e-12)
    assert {rank: each.busy() for rank, each in phase.ranks.items()} == dict.fromkeys(traces, 2.0 * micro_batches)
    assert phase.ranks[0].idle() == 2 * (stages - 1)


def test_uneven_work_is_idle_time_of_the_others():
    """Three data-parallel ranks with 1, 2 and 4 s of work: 3 + 2 + 0 s idle, and 5 / 12 of the phase. Not covered:
    where the uneven work comes from."""
    traces = {rank: Writer().compute(seconds).collective(range(3)) for rank, seconds in enumerate((1.0, 2.0, 4.0))}
    replayed = run(traces)
    replayed.check()
    assert [times(replayed, rank).idle() for rank in range(3)] == [3.0, 2.0, 0.0]
    assert bubble(replayed.steps[0].phases["train/actor"]) == pytest.approx(5 / 12)


def test_ranks_that_are_not_replayed_behave_like_those_that_are():
    """Of a group of 512, two ranks: the price is that of 512, the begin that of the later one. Messages to and from
    the rest take their price. Not covered: that the missing ranks could be later than all replayed."""
    everyone = tuple(range(512))
    price = Prices(collective=0.5, message=0.25)
    traces = {
        3: Writer().collective(everyone, 2).send(99, 4).collective([3, 99], 2),
        64: Writer().compute(1.0).collective(everyone, 2).receive(98, 8).receive(98, 8, wait=False),
    }
    replayed = run(traces, price)
    replayed.check()
    assert replayed.ends == {3: 2.0 + 1.0 + 1.0, 64: 2.0 + 2.0}
    assert ("all_reduce", everyone, 2, False) in price.asked
    assert times(replayed, 3).communication["all_reduce", "512 ranks"].idle == 1.0


def test_steps_and_phases():
    """Two steps of two phases, one of them entered twice a step, and work after the last mark. Waits count in their
    own phase; a mark is no time of its phase. Not covered: ranks whose marks differ."""
    traces = {}
    for rank in (0, 1):
        traces[rank] = writer = Writer()
        for step in (4, 5):
            for phase, seconds in (("rollout", 1.0 + rank), ("train/actor", 2.0), ("rollout", 0.5)):
                writer.phase = phase
                writer.compute(seconds)
            writer.collective([0, 1])
            writer.phase = "save"
            writer.mark(step)
    traces[0].compute(7.0)
    replayed = run(traces)
    replayed.check()
    assert [each.step for each in replayed.steps] == [4, 5, None]
    for each in replayed.steps[:2]:
        assert each.ranks == {0: 4.5, 1: 4.5}
        assert each.seconds() == 4.5
        assert list(each.phases) == ["rollout", "train/actor"]
        assert {rank: of.seconds for rank, of in each.phases["rollout"].ranks.items()} == {0: 2.5, 1: 2.5}
        assert [each.phases["rollout"].ranks[rank].idle() for rank in (0, 1)] == [1.0, 0.0]
        assert bubble(each.phases["train/actor"]) == 0.0
    assert replayed.steps[2].ranks == {0: 7.0}
    assert replayed.steps[2].phases["save"].ranks[0].busy() == 7.0


def test_the_order_in_which_ranks_are_run_does_not_matter():
    """Random programs of four ranks, in which everything fits by construction: renaming the ranks, so that they are run
    in another order, changes no time. Not covered: programs with faults."""
    draw = random.Random(1)
    waited = 0.0
    for _ in range(50):
        traces = {rank: Writer() for rank in range(4)}
        for _ in range(60):
            members = sorted(draw.sample(range(4), draw.randint(1, 4)))
            nbytes = draw.randint(1, 3)
            for rank in members:
                traces[rank].compute(draw.random()).collective(members, nbytes, wait=draw.random() < 0.5)
        other = dict(zip(range(4), draw.sample(range(4), 4), strict=True))
        renamed = {
            other[rank]: [
                replace(event, ranks=tuple(other[each] for each in event.ranks))
                if isinstance(event, Collective)
                else event
                for event in writer.events
            ]
            for rank, writer in traces.items()
        }
        price = Prices(collective=0.5)
        first, second = run(traces, price), replay(renamed, price)
        first.check()
        second.check()
        assert {other[rank]: end for rank, end in first.ends.items()} == second.ends
        waited += times(first, 0).idle()
    assert waited > 0


@pytest.mark.slow
def test_millions_of_events_in_a_minute():
    """16 ranks of 200,000 events, in well under a minute of two cores. Not covered: memory."""
    traces = {}
    for rank in range(16):
        writer = traces[rank] = Writer()
        group = tuple(range(rank % 4, 512, 4))
        for number in range(40_000):
            writer.phase = f"phase {number // 1000 % 5}"
            writer.compute(1e-4).compute(2e-4, "memory").compute(1e-5 * rank)
            writer.collective(group if number % 4 == 0 else range(16))
    assert all(len(writer.events) == 200_000 for writer in traces.values())
    start = time.perf_counter()
    replayed = run(traces, Prices(collective=1e-6))
    seconds = time.perf_counter() - start
    replayed.check()
    assert len({round(end, 6) for end in replayed.ends.values()}) == 1
    assert seconds < 60, f"{seconds:.1f} s"
