"""Faults planted in traces: each is found, named and told from what follows of it.

Not covered: faults of programs (a rehearsal's tests plant those).
"""

import pytest

from megarlhf.rehearsal.timeline.simulate import replay
from megarlhf.rehearsal.timeline.trace import Collective, Compute, Send, StepMark, Wait
from tests.refuses import missing_names, refuses
from tests.rehearsal.traces import Prices, Writer, only_fault, run


def test_sizes_that_differ():
    """Named with every rank's size, once; the replay goes on with the larger one. all_to_all may differ. Not covered:
    which rank is right."""
    traces = {rank: Writer().compute(1.0).collective(range(3), 8) for rank in range(3)}
    for rank, writer in traces.items():
        writer.collective(range(3), 1024 if rank != 2 else 512).compute(1.0).collective(range(3), 8 + rank)
    fault, replayed = only_fault(traces, price=Prices(collective=1 / 1024))
    assert (fault.kind, fault.phase, fault.ranks) == ("size", "train/actor", (0, 1, 2))
    assert fault.events == {0: 3, 1: 3, 2: 3}
    says(
        fault, "2nd collective of group (0, 1, 2)", "ranks 0, 1: an all_reduce of 1,024 bytes in train/actor (event 3)"
    )
    says(fault, "rank 2: an all_reduce of 512 bytes in train/actor (event 3)")
    assert replayed.ends[2] == 2.0 + (8 + 1024 + 10) / 1024

    traces = {rank: Writer().collective([0, 1], 8 * (rank + 1), "all_to_all") for rank in (0, 1)}
    replayed = run(traces, Prices(collective=1.0))
    replayed.check()
    assert replayed.ends == {0: 16.0, 1: 16.0}


def test_operations_that_differ():
    """Nothing after it completes in the group; what follows from it, here that rank 2 waits for rank 0, is no fault.
    Not covered: what NCCL does then."""
    traces = {
        0: Writer().compute(1.0).collective([0, 1], 8, "all_reduce").send(2),
        1: Writer().collective([0, 1], 8, "reduce_scatter").compute(1.0),
        2: Writer().receive(0),
    }
    fault, _ = only_fault(traces)
    assert (fault.kind, fault.ranks, fault.seconds) == ("operation", (0, 1), 1.0)
    says(fault, "rank 0: an all_reduce of 8 bytes", "rank 1: a reduce_scatter of 8 bytes")


def test_operations_that_differ_do_not_undo_what_is_before():
    """Ranks 0 and 1 disagree before rank 2 has come to the collective before it: that one still completes."""
    traces = {rank: Writer().compute(rank).collective(range(3), 8, wait=False) for rank in range(3)}
    for rank, operation in enumerate(("all_reduce", "all_gather", "all_gather")):
        traces[rank].collective(range(3), 8, operation, wait=False).wait(1).compute(1.0).wait(2)
    fault, replayed = only_fault(traces)
    assert fault.kind == "operation"
    says(fault, "rank 0: an all_reduce of 8 bytes in train/actor (event 2)", "ranks 1, 2: an all_gather")
    assert replayed.ends == {0: 3.0, 1: 3.0, 2: 3.0}


def test_collectives_of_two_groups_in_another_order():
    """Ranks 0 and 1 issue those of groups (0, 1) and (0, 1, 2) the other way around: a cycle of two; rank 2 waits
    behind it. Not covered: what is issued in another order but waited for only later, which NCCL may survive."""
    small, large = (0, 1), (0, 1, 2)
    traces = {
        0: Writer().compute(1.0).collective(small).collective(large),
        1: Writer().compute(2.0).collective(large).collective(small),
        2: Writer().collective(large),
    }
    fault, _ = only_fault(traces)
    assert (fault.kind, fault.ranks, fault.seconds) == ("deadlock", (0, 1), 2.0)
    assert fault.events == {0: 2, 1: 2}
    first, second = fault.sentence.split("; ")[1:3]
    says(fault, "ranks 0, 1", "(0 -> 1 -> 0)", "1 other rank")
    named = ("train/actor (event 2)", "event 3")
    assert not missing_names(first, "rank 0", "1 s", "1st collective of group (0, 1)", "rank 1", *named)
    assert not missing_names(second, "rank 1", "2 s", "1st collective of group (0, 1, 2)", "rank 0", *named)

    traces[1].events[1:] = Writer().collective(small).collective(large).events
    run(traces).check()


def test_two_that_send_first():
    """A blocking send to each other: neither comes to its receive, and rank 0, which waits behind one of them, is not
    in the cycle. Without blocking all is well. Not covered: networks that buffer it."""

    def traces(wait):
        pair = {rank: Writer().send(3 - rank, wait=wait).receive(3 - rank) for rank in (1, 2)}
        for writer in pair.values():
            writer.wait(1)
        return {0: Writer().receive(1), 1: pair[1].send(0), 2: pair[2]}

    fault, _ = only_fault(traces(wait=True))
    assert (fault.kind, fault.ranks) == ("deadlock", (1, 2))
    says(fault, "ranks 1, 2", "(1 -> 2 -> 1)", "1st message from rank 1 to rank 2", "event 2")
    run(traces(wait=False)).check()


def test_of_several_that_are_missing_the_first_is_said():
    """Rank 2 has left the group; rank 0 waits for its second collective, rank 1 for its first. And of three messages
    that nobody receives or waits for, the first. Not covered: what rank 2 does instead."""
    traces = {
        0: Writer().collective(range(3), wait=False).collective(range(3)),
        1: Writer().compute(1.0).collective(range(3)),
        2: Writer(),
    }
    fault, _ = only_fault(traces)
    assert (fault.kind, fault.ranks, fault.events) == ("missing", (0, 1, 2), {0: 0, 1: 1})
    says(fault, "(events 0, 1)", "1st collective of group (0, 1, 2)", "rank 2 never issues")

    sender = Writer().compute(1.0).send(1, wait=False).send(1, wait=False).send(1, wait=False)
    fault, _ = only_fault({0: sender, 1: Writer()})
    assert (fault.kind, fault.events) == ("missing", {0: 1})
    says(fault, "1st message", "0 on rank 1 and 3 on rank 0")


@pytest.mark.parametrize("wait", [True, False])
def test_a_send_without_its_receive(wait):
    """Waited for or not. The rank that waits behind the sender is no fault of its own. Not covered: which message of
    many equal ones has no other end."""
    traces = {
        3: Writer().send(7, 8).compute(1.0).send(7, 1024, wait=wait).collective([3, 5]),
        5: Writer().collective([3, 5]),
        7: Writer().receive(3, 8),
    }
    fault, _ = only_fault(traces)
    assert (fault.kind, fault.ranks, fault.phase) == ("missing", (3, 7), "train/actor")
    assert fault.events == {3: 3}
    says(fault, "rank 3 sends 1,024 bytes to rank 7", "2nd message", "event 3", "1 on rank 7 and 2 on rank 3")


@pytest.mark.parametrize("wait", [True, False])
def test_a_receive_without_its_send(wait):
    """The other end, in a group. Not covered: as above."""
    traces = {3: Writer().compute(1.0), 7: Writer().compute(0.5).receive(3, 1024, wait=wait, ranks=(3, 7))}
    fault, _ = only_fault(traces)
    assert (fault.kind, fault.ranks, fault.events) == ("missing", (7, 3), {7: 1})
    says(fault, "rank 7 receives 1,024 bytes from rank 3", "1st message", "event 1", "group (3, 7)")
    says(fault, "0 on rank 3 and 1 on rank 7")
    assert fault.seconds == 0.5


def test_sizes_of_messages_that_differ():
    """Both ends are said, and the larger size is priced. Not covered: which end is right."""
    traces = {0: Writer().send(1, 16), 1: Writer().compute(1.0).receive(0, 8).compute(1.0)}
    fault, replayed = only_fault(traces, price=Prices(message=0.125))
    assert (fault.kind, fault.ranks) == ("size", (0, 1))
    says(fault, "rank 0: sends 16 bytes to rank 1", "rank 1: receives 8 bytes from rank 0")
    assert replayed.ends == {0: 3.0, 1: 4.0}


@pytest.mark.parametrize("wait", [True, False])
def test_one_collective_more_at_the_end(wait):
    """Rank 1 of three issues one that the others do not. Not covered: which of many equal ones is too many."""
    traces = {rank: Writer().collective(range(3)).collective(range(3)) for rank in range(3)}
    traces[1].phase = "evaluate"
    traces[1].collective(range(3), 64, wait=wait)
    fault, _ = only_fault(traces)
    assert (fault.kind, fault.phase, fault.ranks, fault.events) == ("missing", "evaluate", (1, 0, 2), {1: 4})
    says(fault, "rank 1 issues an all_reduce of 64 bytes in evaluate (event 4)", "3rd collective of group (0, 1, 2)")
    says(fault, "ranks 0, 2 never issue", "2 on ranks 0, 2 and 3 on rank 1")


def test_one_collective_more_in_the_middle():
    """Rank 1 scores with one all_reduce more, then both meet in another group: they wait for each other, and what is
    said is that the numbers differ, with the first place at which the phases do. Not covered: a surplus in the same
    phase, of which only the number is known."""

    def trace(surplus):
        writer = Writer()
        for phase in ("score", "train/actor"):
            writer.phase = phase
            writer.collective([0, 1])
            if surplus and phase == "score":
                writer.collective([0, 1])
            writer.collective([0, 1, 2])
        return writer

    traces = {0: trace(False), 1: trace(True)}
    fault, _ = only_fault(traces)
    assert (fault.kind, fault.ranks, fault.events) == ("missing", (0, 1), {0: 3, 1: 3})
    says(fault, "ranks 0, 1", "(0 -> 1 -> 0)", "group (0, 1) in all: 2 on rank 0 and 3 on rank 1")
    says(fault, "the 2nd is the first", "(train/actor on rank 0, score on rank 1)")


def test_independent_faults_are_all_found_in_order():
    """Two pairs of ranks, each with a fault; the thousand collectives behind the second are none. Not
    covered: a fault that only shows where another one is mended."""
    traces = {rank: Writer().compute(1.0 + rank) for rank in range(4)}
    traces[0].collective([0, 1], 8)
    traces[1].collective([0, 1], 9)
    traces[2].receive(3)
    for _ in range(1000):
        for rank in (2, 3):
            traces[rank].collective([2, 3])
    replayed = run(traces)
    assert [(fault.kind, fault.ranks) for fault in replayed.faults] == [("size", (0, 1)), ("missing", (2, 3))]


@pytest.mark.parametrize(
    ("events", "names"),
    [
        ([Wait("a", 1)], ["number 1", "not issued"]),
        ([Send("a", 9, 8, 1), Send("a", 9, 8, 1)], ["number 1", "second time"]),
        ([StepMark("a", 1), StepMark("a", 1)], ["step 1", "marked before"]),
        ([Collective("a", "barrier", (1, 2), 0, 1)], ["not include"]),
        ([Compute("a", float("nan"))], ["nan seconds"]),
        ([Send("a", 0, 8, 1)], ["itself"]),
    ],
)
def test_what_is_no_trace_is_refused(events, names):
    with refuses(f"rank 0, event {len(events) - 1}", *names):
        replay({0: events, 1: [], 2: []}, Prices())


def says(fault, *names):
    assert not missing_names(fault.sentence, *names), fault.sentence
