"""A failure on one rank is raised on all, over gloo. Not covered: NCCL; a rank that dies."""

import sys

import pytest
import torch
import torch.distributed as dist

from megarlhf.collective_errors import on_first_rank, raise_on_all_ranks
from tests.ranks import RankPool


class Stopped(RuntimeError):
    pass


def stopped(reasons):
    return Stopped(" | ".join(reasons))


def _sum(rank):
    """What only works while all ranks are at the same collective."""
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return int(total)


def _whole(runtime):
    rank = runtime.rank
    with raise_on_all_ranks(stopped) as reasons:
        value = rank + 1
    assert reasons == []
    return value, _sum(rank)


def _one_raises(runtime):
    rank = runtime.rank
    with pytest.raises(Stopped) as raised, raise_on_all_ranks(stopped):
        {0: "a", 2: "b"}[rank]
    cause = raised.value.__cause__
    return str(raised.value), type(cause).__name__, _sum(rank)


def _one_exits(runtime):
    """As a library does that calls sys.exit; KeyboardInterrupt, on all ranks, goes through."""
    rank = runtime.rank
    with pytest.raises(Stopped) as raised, raise_on_all_ranks(stopped):
        {1: sys.exit}.get(rank, int)(0)
    with pytest.raises(KeyboardInterrupt), raise_on_all_ranks(stopped):
        raise KeyboardInterrupt
    return str(raised.value), _sum(rank)


def _find(rank):
    """Rank 1 raises too, after it has found something; 0 and 2 find the same."""
    with raise_on_all_ranks(stopped) as reasons:
        reasons.append("no room" if rank != 1 else "no light")
        if rank == 1:
            raise StopIteration("late")


def _several_find(runtime):
    rank = runtime.rank
    with pytest.raises(Stopped) as raised:
        _find(rank)
    return str(raised.value), _sum(rank)


def _in_a_group(runtime):
    """The group is ranks 2 and 1; rank 0 goes on."""
    rank = runtime.rank
    group = dist.new_group([1, 2])
    message = ""
    if rank:
        with pytest.raises(Stopped) as raised, raise_on_all_ranks(stopped, group):
            assert rank == 1, "wrong rank"
        message = str(raised.value)
    return message, _sum(rank)


def _only_first(runtime):
    """The first call is refused, the second is not; which ranks have made them."""
    calls = []

    def refuse():
        calls.append("refused")
        raise ValueError("no")

    with pytest.raises(ValueError, match=r"^no$"):
        on_first_rank(refuse)
    on_first_rank(lambda: calls.append("done"))
    return calls, _sum(runtime.rank)


def test_what_the_first_rank_alone_does_is_refused_on_all(ranks: RankPool):
    assert ranks.run(2, _only_first) == [(["refused", "done"], 1), ([], 1)]


def test_nothing_fails(ranks: RankPool):
    assert ranks.run(3, _whole) == [(1, 3), (2, 3), (3, 3)]


def test_one_rank_raises(ranks: RankPool):
    """The same reason everywhere; the traceback of the cause where it happened."""
    message = "rank 1: KeyError: 1"
    errors = ranks.run(3, _one_raises)
    assert errors == [(message, "NoneType", 3), (message, "KeyError", 3), (message, "NoneType", 3)]


def test_one_rank_calls_sys_exit(ranks: RankPool):
    """No rank ends, and none waits for it."""
    assert ranks.run(3, _one_exits) == [("rank 1: SystemExit: 0", 3)] * 3


def test_equal_reasons_are_told_once(ranks: RankPool):
    message = "rank 0, 2: no room | rank 1: no light | rank 1: StopIteration: late"
    assert ranks.run(3, _several_find) == [(message, 3)] * 3


def test_ranks_of_a_group_bear_their_global_numbers(ranks: RankPool):
    by_rank = ranks.run(3, _in_a_group)
    assert by_rank[0] == ("", 3)
    assert by_rank[1] == by_rank[2]
    assert by_rank[1][0].startswith("rank 2: AssertionError: wrong rank")
    assert by_rank[1][1] == 3
