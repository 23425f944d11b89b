"""Stepping an engine of vLLM's: what counts as a response, and what ranks agree on. A stand-in takes the steps.

Not covered here: the real vLLM, and ranks that fail alone (tests/distributed/test_rollout_resume.py).
"""

from types import SimpleNamespace

import pytest

from megarlhf.rollout.balance import EngineAssignment
from megarlhf.rollout.engine import EngineFailure
from megarlhf.rollout.prompt_queue import NOTHING, PromptQueue
from megarlhf.rollout.responses import FinishedResponses, Sampling
from megarlhf.rollout.vllm.generate_loop import GenerateLoop, response_of, run_in_lockstep
from tests.tables import make_response, numbered_rows

SAMPLING = Sampling(max_tokens=3, end_ids=(2, 9))
ROWS = numbered_rows(SAMPLING)


def feed_of(*rows):
    """Of one engine, which begins with all."""
    return PromptQueue(EngineAssignment([rows]), 0)


def loop_of(engine, feed, bank, **places):
    return GenerateLoop(engine, engine.enqueue, feed, ROWS, SAMPLING, 3, bank, **places)


def flat(tokens, logprob=-0.5):
    """vLLM's FlatLogprobs, with the likeliest token behind the one that was drawn at each position."""
    places = list(range(0, 2 * len(tokens), 2))
    pairs = [(token, 77) for token in tokens]
    return SimpleNamespace(
        start_indices=places,
        token_ids=[token for pair in pairs for token in pair],
        logprobs=[value for _ in tokens for value in (logprob, -0.1)],
    )


def output(tokens, reason, request_id="0"):
    sampled = SimpleNamespace(token_ids=tokens, logprobs=flat(tokens), finish_reason=reason)
    return SimpleNamespace(outputs=[sampled], finished=reason is not None, request_id=request_id)


class Engine:
    """Finishes one request in each step, the last first; outputs that are not finished are in between."""

    def __init__(self):
        self.open: list[str] = []
        self.aborted: list[str] = []
        self.steps = 0

    def enqueue(self, rows):
        assert len(rows) == 3
        self.open = ["10-a1", "11-b2", "12-c3"]
        return list(self.open)

    def get_num_unfinished_requests(self):
        return len(self.open)

    def step(self):
        self.steps += 1
        return [output([5], None, self.open[0].split("-")[0]), output([2], "stop", self.open.pop().split("-")[0])]

    def abort_request(self, requests, internal):
        assert internal
        self.aborted, self.open = list(requests), []


def test_each_row_gets_its_own_response_as_it_finishes():
    engine, seen = Engine(), []
    bank = FinishedResponses()
    bank.add = lambda row, response: seen.append((engine.steps, row, response))
    assert loop_of(engine, feed_of(4, 7, 6), bank).run() is False
    expected = make_response([2], [-0.5], True, 3)
    assert seen == [(1, 6, expected), (2, 7, expected), (3, 4, expected)]


def test_a_rank_answers_for_its_own_rows_only():
    engine, bank = Engine(), FinishedResponses()
    loop_of(engine, feed_of(4, 7, 6), bank, place=1, num_places=3).run()
    assert bank.held == {7: make_response([2], [-0.5], True, 3)}
    assert engine.steps == 3, "all are drawn"


def test_logprobs_of_other_tokens_are_refused():
    wrong = output([5, 2], "stop")
    wrong.outputs[0].logprobs.token_ids[2] = 3
    with pytest.raises(EngineFailure, match="log-probs belong to other tokens"):
        response_of(wrong, SAMPLING, 3)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_stop_keeps_what_is_finished_and_aborts_the_rest(after):
    engine, bank = Engine(), FinishedResponses()
    stopped = loop_of(engine, feed_of(0, 1, 2), bank).run(lambda: engine.steps == after)
    assert (stopped, sorted(bank.held), engine.steps) == (True, [2, 1, 0][:after][::-1], after)
    assert engine.aborted == ["10-a1", "11-b2", "12-c3"][: 3 - after]


def test_a_stop_after_the_last_response_is_none():
    engine, bank = Engine(), FinishedResponses()
    assert loop_of(engine, feed_of(0, 1, 2), bank).run(lambda: engine.steps == 3) is False
    assert sorted(bank.held) == [0, 1, 2]
    assert engine.aborted == []


def test_a_failure_is_raised_and_logged_with_its_traceback(one_rank, caplog):
    def steps():
        yield 3, NOTHING, []
        raise MemoryError("planted")

    with pytest.raises(MemoryError, match="planted"):
        run_in_lockstep(steps())
    assert "failed on rank 0" in caplog.text
    assert "in steps" in caplog.text


@pytest.mark.parametrize(
    "tokens, reason, finished",
    [([5, 2], "stop", True), ([9], "stop", True), ([5, 5, 2], "stop", True), ([5, 5, 5], "length", False)],
)
def test_a_response_ends_with_an_end_token_or_at_its_limit(tokens, reason, finished):
    assert response_of(output(tokens, reason), SAMPLING, 3) == make_response(tokens, [-0.5] * len(tokens), finished, 3)


@pytest.mark.parametrize(
    "tokens, reason",
    [
        ([5], "length"),  # the engine's own limit, before the sampling's
        ([], "length"),  # a prompt that the engine ignored
        ([5], "abort"),
        ([5, 5, 5], "abort"),
        ([5], "error"),
        ([5, 5], "repetition"),
        ([5, 5, 5], "stop"),
        ([5, 2], "length"),
        ([5, 2], "abort"),
    ],
)
def test_no_other_end_is_taken_for_a_response(tokens, reason):
    with pytest.raises(EngineFailure, match=f"for the reason '{reason}' after {len(tokens)} of at most 3 tokens"):
        response_of(output(tokens, reason), SAMPLING, 3)
