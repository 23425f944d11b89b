"""Calls of users' reward functions in one process: what is a failure, what is said of it, and what goes through.

Not covered: the lines that are named, and imports (test_reward_lines.py); workers (test_reward_pool.py,
test_reward_processes.py); what a run makes of results.
"""

import asyncio
import functools
import itertools
import sys
import threading

import pytest
import torch

from megarlhf.errors import WatchdogInterrupt
from megarlhf.own_code.failures import short
from megarlhf.rollout.rewards.batch import FP32_MAX, RewardResult, TokenRewards
from megarlhf.rollout.rewards.calls import AT_ONCE, call
from megarlhf.rollout.rewards.forms import Form, form_of
from tests.rollout.test_reward_pool import batch


def results(function, rows=None, seconds=None) -> list[RewardResult]:
    return call(function, form_of(function), rows or batch(), seconds)


def returning(value):
    return lambda prompt, response, fields: value


@pytest.mark.parametrize(
    "value, said",
    [
        (1e39, "returned 1e+39, "),
        (-3.41e38, "returned -3.41e+38, "),
        ({"a": 1e300, "b": 1.0}, "returned 1e+300, "),
        ({"a": 3e38, "b": 3e38}, "returned numbers with the sum 6e+38, "),
        (TokenRewards([3e38] * 3), "returned TokenRewards with the sum 9e+38, "),
    ],
)
def test_what_fp32_cannot_hold_is_refused(value, said):
    """It would be infinite in a column of rewards; a sum too."""
    *_, last = results(returning(value))
    assert last.error.startswith(said + "expected a number that fp32 holds, from -3.40282e+38 to 3.40282e+38; scale")
    assert last.value is None


def test_what_fp32_can_hold_is_taken():
    assert torch.finfo(torch.float32).max == FP32_MAX
    assert [result.value for result in results(returning(-FP32_MAX))] == [-FP32_MAX] * 3


def stops(prompt, response, fields):
    if response == "bb":
        sys.exit(0)
    return 1.0


async def stops_later(prompt, response, fields):
    await asyncio.sleep(0)
    return stops(prompt, response, fields)


@pytest.mark.parametrize("function", [stops, stops_later])
def test_sys_exit_is_a_failure(function):
    """Of its sample only, and with the line; with status 0 it would end a rank as if all were well."""
    first, failed, last = results(function)
    assert (first.value, last.value) == (1.0, 1.0)
    assert failed.error.startswith("raised SystemExit: 0; a function must return, not exit; " + __file__)
    assert failed.error.endswith("sys.exit(0)")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, WatchdogInterrupt])
@pytest.mark.parametrize("waits", [False, True])
def test_what_signals_raise_goes_through(interrupt, waits):
    """And ends what other samples wait for; the next batch is rewarded as ever."""
    ended = []

    async def later(prompt, response, fields):
        if response == "ccc":
            raise interrupt("now")
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(response)

    def at_once(prompt, response, fields):
        raise interrupt("now")

    with pytest.raises(interrupt, match="now"):
        results(later if waits else at_once)
    assert sorted(ended) == (["a", "bb"] if waits else [])
    assert [result.value for result in results(stops_later, batch(responses=("a",)))] == [1.0]


def test_async_calls_share_a_loop():
    """What one batch has left in it, such as a client, serves the next, also in another thread."""
    kept = {}

    async def judged(prompt, response, fields):
        if not kept:
            kept["asked"] = asyncio.Queue()
            kept["task"] = asyncio.create_task(serve(kept["asked"]))
        answer = asyncio.get_running_loop().create_future()
        await kept["asked"].put(answer)
        return await answer

    async def serve(asked):
        for number in itertools.count():
            (await asked.get()).set_result(number)

    found = results(judged, seconds=20)
    thread = threading.Thread(target=lambda: found.extend(results(judged, seconds=20)))
    thread.start()
    thread.join()
    found += results(judged, seconds=20)
    assert [result.error or result.value for result in found] == list(range(9))
    kept["task"].cancel()


class Judge:
    def __call__(self, prompt, response, fields):
        return 1.0 / len(response[1:])

    async def ask(self, prompt, response, fields):
        return 1.0


class AsyncJudge:
    async def __call__(self, batch):
        return [2.0] * len(batch)


@pytest.mark.parametrize(
    "function, form",
    [
        (functools.partial(stops_later), Form(is_async=True)),
        (functools.partial(AsyncJudge()), Form("batch", is_async=True, positional=())),
        (functools.partial(Judge().ask), Form(is_async=True)),
        (functools.partial(stops), Form()),
        (Judge(), Form()),
    ],
)
def test_forms_below_partials(function, form):
    assert form_of(function) == form
    first = results(function, batch(responses=("bc",)))[0]
    assert first.value == (2.0 if form.batched else 1.0)


def test_a_time_out_of_the_user_s_own_is_no_late_call():
    """With his line; a call that takes too long is late, also one that refuses to be cancelled."""

    async def judged(prompt, response, fields):
        if response == "a":
            raise TimeoutError
        if response == "bb":
            await asyncio.wait_for(asyncio.sleep(600), 0.01)
        for _ in range(2):
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                fields["cancelled"] = True

    rows = batch()
    bare, waited, late = results(judged, rows, seconds=0.5)
    assert bare.error.startswith("raised TimeoutError; " + __file__)
    assert waited.error.startswith("raised TimeoutError; " + __file__)
    assert waited.error.endswith("await asyncio.wait_for(asyncio.sleep(600), 0.01)")
    assert (late.error, late.late, bare.late, waited.late) == ("took longer than 0.5 s", True, False, False)
    assert rows.fields[2]["cancelled"]


class Bad:
    """Raises whatever is asked of it."""

    def __init__(self, error):
        self.error = error

    def __float__(self):
        raise self.error

    def __repr__(self):
        raise self.error

    def __iter__(self):
        raise self.error


@pytest.mark.parametrize(
    "value, words",
    [
        (Bad(ValueError()), "returned a Bad whose repr raises ValueError, expected a number; return a float"),
        pytest.param(
            10**5000, "returned a int whose repr raises ValueError, expected a number; return a float", id="long"
        ),
        (
            TokenRewards(None),
            "returned TokenRewards(values=None); reading it raised TypeError: 'NoneType' object is not",
        ),
    ],
)
def test_values_that_cannot_be_read(value, words):
    """Said of the sample; the others have their rewards, in a batch too."""
    for function in (
        lambda prompt, response, fields: value if response == "bb" else 1.0,
        lambda batch: [1.0, value, 1.0],
    ):
        first, failed, last = results(function)
        assert failed.error.startswith(words)
        assert (first.value, last.value) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0], "returned 1 values for 3 responses; return one for each"),
        ("good", "returned 'good', expected one value for each of 3 responses"),
        (Bad(OSError("gone")), "returned a Bad whose repr raises OSError; reading it raised OSError: gone"),
    ],
)
def test_a_batch_that_is_no_sequence_of_as_many_values(value, words):
    assert [result.error for result in results(lambda batch: value)] == [words] * 3


def test_the_watchdog_may_interrupt_the_reading():
    with pytest.raises(WatchdogInterrupt):
        results(returning(Bad(WatchdogInterrupt())))
    with pytest.raises(WatchdogInterrupt):
        results(lambda batch: Bad(WatchdogInterrupt()))


def test_cancelling_is_a_failure_of_its_sample():
    """By hand, of its own task, and of the loop: only the last takes the batch with it."""

    def raises(prompt, response, fields):
        raise asyncio.CancelledError("by hand")

    async def judged(prompt, response, fields):
        if response == "bb":
            asyncio.current_task().cancel()
        if response == "ccc":
            raises(prompt, response, fields)
        return 1.0

    async def stops_all(prompt, response, fields):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(5)

    async def cancels_all(prompt, response, fields):
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(5)

    assert results(raises)[0].error.startswith("raised CancelledError: by hand; " + __file__)
    first, second, third = results(judged)
    assert (first.value, second.error) == (1.0, "cancelled its own task")
    assert third.error.startswith("raised CancelledError: by hand; " + __file__)
    assert "raised RuntimeError: Event loop stopped before Future completed" in results(stops_all)[2].error
    assert results(cancels_all)[2].error.startswith("raised CancelledError")
    assert [result.value for result in results(stops_later, batch(responses=("a",)))] == [1.0]


def test_several_async_calls_wait_together():
    """`AT_ONCE` at a time and no more."""
    waiting, most = 0, 0

    async def judged(prompt, response, fields):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.02)
        waiting -= 1
        return len(response)

    rows = batch().part([0, 1, 2] * 20)
    assert [result.value for result in results(judged, rows)] == [1, 2, 3] * 20
    assert most == AT_ONCE


def test_short_never_raises():
    assert short("x" * 100) == "'" + "x" * 56 + "..."
    assert short(Bad(RuntimeError())) == "a Bad whose repr raises RuntimeError"
