"""Assignment of samples to engines, by hand; and an engine that takes more, with a stand-in for vLLM.

Not covered here: the real vLLM on several ranks (tests/distributed/test_rollout_balance.py).
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarlhf.rollout.balance import EngineAssignment, PromptChunk, SeenLengths, assign, chunk_by_length
from megarlhf.rollout.prompt_queue import NOTHING, PromptQueue, SharedCounter
from megarlhf.rollout.responses import FinishedResponses, ResponsePart
from megarlhf.rollout.vllm.generate_loop import GenerateLoop
from tests.rollout.test_generate_loop import SAMPLING, output
from tests.tables import numbered_rows, row_numbers


def prompts_of(*lengths):
    return [torch.arange(length) + 10 * length for length in lengths]


def whole(max_tokens, count=1):
    return [ResponsePart((), max_tokens)] * count


def chunks(*works):
    return [PromptChunk((row,), work) for row, work in enumerate(works)]


def test_a_prompt_s_samples_are_a_piece_and_its_work_counts_the_prompt_once():
    """Two samples each of prompts of 3, 5 and 4 tokens, 100 expected of a response, and one engine."""
    chunked = chunk_by_length(prompts_of(3, 5, 4, 3, 5, 4), whole(100, 6), range(6), 1, SeenLengths())
    assert chunked == [PromptChunk((1, 4), 205), PromptChunk((2, 5), 204), PromptChunk((0, 3), 203)]


def test_few_prompts_are_cut_so_that_each_engine_has_some():
    """16 samples of one prompt, two engines: eight pieces; rows that are not missing are left out."""
    chunked = chunk_by_length(prompts_of(*[3] * 20), whole(10, 20), range(4, 20), 2, SeenLengths())
    assert [piece.rows for piece in chunked] == [(n, n + 1) for n in range(4, 20, 2)]
    assert {piece.work for piece in chunked} == {23}


def test_expected_lengths_are_those_seen():
    """Of the prompt, of the last rollout, or the longest that may be; the earliest prompts are forgotten."""
    a, b, c, d = prompts_of(1, 2, 3, 4)
    seen = SeenLengths(max_prompts=2)
    assert seen.expected(a, *whole(64)) == 64
    seen.record([a, a, b], [10, 20, 60])
    assert [seen.expected(prompt, *whole(64)) for prompt in (a, b, c)] == [15, 60, 30]
    assert seen.expected(b, *whole(50)) == 50
    seen.record([c, b], [8, 4])
    assert [seen.expected(prompt, *whole(64)) for prompt in (a, b, c, d)] == [6, 4, 8, 6]
    seen.record([], [])
    assert seen.expected(d, *whole(64)) == 6


def test_a_part_is_expected_to_be_as_long_as_the_rest_of_its_response():
    """A response of 15 tokens of which 4, 12 and 20 are drawn, in parts of 8: 8, 3, and 8 since it is longer already.
    Its earlier tokens are computed again."""
    (prompt,) = prompts_of(3)
    seen = SeenLengths()
    seen.record([prompt], [15])
    parts = [ResponsePart([0] * drawn, drawn + 8) for drawn in (4, 12, 20)]
    assert [seen.expected(prompt, part) for part in parts] == [8, 3, 8]
    rows = [torch.cat([prompt, torch.zeros(len(part.so_far), dtype=torch.int64)]) for part in parts]
    chunked = chunk_by_length(rows, parts, [0, 1], 1, seen)
    assert chunked == [PromptChunk((1,), 3 + 12 + 3), PromptChunk((0,), 3 + 4 + 8)]


def test_fixed_shares_are_equal_numbers_in_order():
    assert assign("fixed", chunks(9, 1, 1, 1, 1), 2) == EngineAssignment([[0, 1, 2], [3, 4]])


def test_the_longest_first_to_the_engine_with_the_least():
    """9 | 5, then 4 to the second (9), 3 to the first (12), 2 and 1 to the second (12)."""
    assert assign("length", chunks(9, 5, 4, 3, 2, 1), 2) == EngineAssignment([[0, 3], [1, 2, 4, 5]], [], 3)


def test_on_demand_engines_begin_with_three_quarters_and_the_rest_waits():
    """Nine chunks for two engines: six are assigned, three are queued."""
    assignment = assign("on_demand", chunks(9, 8, 7, 6, 5, 4, 3, 2, 1), 2)
    assert assignment == EngineAssignment([[0, 3, 4], [1, 2, 5]], [(6,), (7,), (8,)], 5)
    assert assign("on_demand", chunks(2, 1), 2) == EngineAssignment([[], []], [(0,), (1,)], 1)
    assert assign("on_demand", [], 2) == EngineAssignment([[], []], [], 0)


@pytest.mark.parametrize("balance", ["fixed", "length", "on_demand"])
def test_one_engine_draws_all_in_order(balance):
    assert assign(balance, chunks(1, 5, 3), 1) == EngineAssignment([[0, 1, 2]])


@pytest.mark.parametrize("balance", ["fixed", "length", "on_demand"])
@pytest.mark.parametrize("num_engines", [2, 3, 7])
def test_each_row_goes_to_one(balance, num_engines):
    prompts = prompts_of(*(3 + n % 5 for n in range(23)))
    chunked = chunk_by_length(prompts, whole(10, 23), range(2, 23), num_engines, SeenLengths())
    assignment = assign(balance, chunked, num_engines)
    assert len(assignment.first) == num_engines
    rows = [row for part in (*assignment.first, *assignment.queue) for row in part]
    assert sorted(rows) == list(range(2, 23))


def test_an_engine_asks_when_it_has_room_and_has_no_more_than_a_fair_share():
    assignment = EngineAssignment([[0], [1]], [(2, 3), (4,)], max_unfinished=3)
    store = dist.HashStore()
    counter = SharedCounter(lambda: store, "n")
    queues = [PromptQueue(assignment, 0, counter), PromptQueue(assignment, 1, counter)]
    counter.restart()
    asked = [
        queues[0].wants_more(unfinished, room) for unfinished, room in ((0, True), (1, True), (1, False), (2, True))
    ]
    assert asked == [True, True, False, False]
    assert [queues[1].ask(), queues[0].ask(), queues[1].ask()] == [0, 1, 2]
    assert (queues[1].take(0), queues[0].take(1), queues[1].take(2)) == ((2, 3), (4,), ())
    assert (queues[0].is_open, queues[1].is_open) == (True, False)
    assert not queues[1].wants_more(0, True)
    assert PromptQueue(assignment, 0).ask() == NOTHING, "a rank that is not its engine's first"
    counter.restart()
    queues[0].close()
    assert queues[1].ask() == len(assignment.queue), "the others find the queue used up"


def test_a_rank_may_ask_before_the_others_begin():
    """A rollout's numbers are its own: those of the one before neither go on nor come back."""
    store = dist.HashStore()
    first, second = (SharedCounter(lambda: store, "n") for _ in range(2))
    assert [first.next(), second.next(), first.next()] == [0, 1, 2]
    second.restart()
    assert [second.next(), second.next()] == [0, 1]
    first.restart()
    assert [first.next(), second.next()] == [2, 3]


class OneAtATime:
    """Draws one request in each step; the others wait."""

    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1))

    def __init__(self):
        self.open, self.aborted, self.begun = [], [], []
        scheduler = SimpleNamespace(get_request_counts=lambda: (min(1, len(self.open)), max(0, len(self.open) - 1)))
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))

    def enqueue(self, requests):
        rows = row_numbers(requests)
        names = [f"{100 + row}-x" for row in rows]
        self.begun += rows
        self.open += names
        return names

    def get_num_unfinished_requests(self):
        return len(self.open)

    def step(self):
        return [output([2], "stop", self.open.pop(0).split("-")[0])]

    def abort_request(self, requests, internal):
        self.aborted, self.open = list(requests), []


def draws(assignment, others=0, **options):
    """(engine, bank, counter, stopped) of the first of two engines; the other has taken so many pieces before."""
    store, engine, bank = dist.HashStore(), OneAtATime(), FinishedResponses()
    counter = SharedCounter(lambda: store, "n")
    counter.restart()
    counter.next(others)
    loop = GenerateLoop(
        engine, engine.enqueue, PromptQueue(assignment, 0, counter), numbered_rows(SAMPLING), SAMPLING, 0, bank,
        options.get("place", 0), options.get("num_places", 1),
    )  # fmt: skip
    stopped = loop.run(options.get("should_stop"))
    return engine, bank, counter, stopped


QUEUED = EngineAssignment([[7, 8], [9]], [(0, 1), (2,), (3,)], max_unfinished=3)


@pytest.mark.parametrize("others, rows", [(0, [7, 8, 0, 1, 2, 3]), (1, [7, 8, 2, 3]), (3, [7, 8]), (5, [7, 8])])
def test_an_engine_draws_what_the_others_have_left(others, rows):
    engine, bank, _, stopped = draws(QUEUED, others)
    assert (engine.begun, sorted(bank.held), stopped) == (rows, sorted(rows), False)


def test_the_ranks_of_an_engine_answer_for_every_other_row_as_they_come():
    _, bank, _, _ = draws(QUEUED, place=1, num_places=2)
    assert sorted(bank.held) == [1, 3, 8]


def test_who_is_asked_to_stop_leaves_nothing_in_the_queue():
    steps = iter([False, False, True])
    engine, bank, counter, stopped = draws(QUEUED, should_stop=lambda: next(steps))
    assert stopped
    assert sorted(bank.held) == [7, 8]
    assert engine.aborted == []
    assert counter.next() >= len(QUEUED.queue)
