"""Users' environments in worker processes: answers, random numbers, recorded conversations, and the end.

The environments stand in environments_for_tests.py and do what a turn's text says; an answer holds all turns so far. A
file has a line for each call. Not covered: what goes wrong (test_environment_failures.py), what a rollout makes of
answers, random numbers of GPUs.
"""

import dataclasses
import math
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from megarlhf.rollout.environments import worker_thread
from megarlhf.rollout.environments.answer import Answer, WrongAnswer, answer_of, opening_of
from megarlhf.rollout.environments.protocol import AnsweredCall, CallResult
from megarlhf.rollout.environments.random_state import RandomState
from tests.rollout.environment_talk import talks, turn


@pytest.fixture
def talk(tmp_path):
    yield from talks(tmp_path)


# --- answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Sync", "Async"])
def test_a_conversation(talk, name):
    """From the beginning to the end: messages, rewards, `done`, and `close`, which may fail. Sync and async methods."""
    made = talk(name)
    a, b = made.begun("a", "fails to close")
    assert made.answer(a, "x") == (a, Answer([{"role": "user", "content": "x"}], 1.0), "", False, False)
    assert made.answer(a, "y").answer.messages[0]["content"] == "x | y"
    assert made.answer(a, "done").answer == Answer([{"role": "user", "content": "x | y | done"}], 3.0, done=True)
    made.pool.forget(b)
    made.pool.forget(a)
    assert made.when("a", "close") == made.when("fails to close", "close")
    assert made.text(made.replies(made.begin("c"))[0]) == "c 7", "the worker lives on"
    assert made.when("c", "reset") == made.when("a", "close")
    assert not made.pool.replies()
    assert 0 < made.pool.busy_seconds < 30


def test_a_content_of_text_parts_is_one_text():
    """Templates write such parts differently, and most as a list of Python."""
    parts = ["a", {"type": "text", "text": "b"}]
    image = [{"type": "image", "url": "c"}]
    messages = [{"role": "tool", "content": parts, "name": "d"}, {"role": "user", "content": image}]
    assert answer_of(Answer(messages)).messages == [{**messages[0], "content": "ab"}, messages[1]]
    assert opening_of(messages[:1]).messages[0]["content"] == "ab"


@pytest.mark.parametrize("reward", [1e39, -1e39, math.inf, math.nan, "1"])
def test_a_reward_that_no_column_holds_is_refused(reward):
    with pytest.raises(WrongAnswer, match="expected a number that fp32 holds"):
        answer_of(Answer(reward=reward))


def test_arguments_belong_to_the_conversation(talk):
    made = talk("Collects", args={"seen": []})
    keys = [made.pool.begin({}, seed) for seed in (5, 6)]
    made.replies(*keys)
    assert [made.answer(key, "x").answer.messages for key in keys] == ["1", "1"]


def test_async_conversations_wait_together(talk):
    """64 conversations of half a second each in one worker; one after the other they take 32 s."""
    made = talk("Async")
    keys = made.begun(*map(str, range(64)))
    start = time.monotonic()
    for key in keys:
        made.step(key, "wait 0.5")
    assert made.says(*keys) == ["wait 0.5"] * 64
    assert 0.5 < time.monotonic() - start < 5
    assert len({made.when(str(n), "step") for n in range(64)}) == 1
    assert made.pool.busy_seconds > 0.5, "time in which it had something to answer"


def test_sync_calls_run_one_after_the_other_and_conversations_are_spread(talk):
    """Two workers, two conversations each, which stay there. A conversation that is gone makes room."""
    made = talk(workers=2)
    names = ["a", "b", "c", "d"]
    keys = made.begun(*names)
    for key in keys:
        made.step(key, "sleep 0.1")
    made.replies(*keys)
    process = {name: made.when(name, "step") for name in names}
    assert process == {name: made.when(name, "reset") for name in names}
    assert process["a"] == process["c"] != process["b"] == process["d"]
    for first, second in (("a", "c"), ("b", "d")):
        spans = sorted((made.log(name, "step")[0][1], made.log(name, "stepped")[0][1]) for name in (first, second))
        assert spans[0][1] <= spans[1][0], "they overlap"
    made.pool.forget(keys[1])
    made.begun("e")
    assert made.when("e", "reset") == process["b"]


def test_a_sync_method_may_have_an_event_loop_of_its_own(talk):
    """`asyncio.run` fails where a loop runs already."""
    made = talk()
    assert made.text(made.answer(made.begun("a"), "asyncio.run")) == "asyncio.run"


def test_random_numbers_belong_to_the_conversation(talk):
    """The same alone and interleaved, for `random` and numpy, in tasks of the environment's too. Not covered: threads
    and callbacks."""
    made = talk("Draws", args={})
    alone = []
    for seed in (5, 6):
        key = made.pool.begin({}, seed)
        made.replies(key)
        alone.append([made.answer(key, "x").answer.messages for _ in range(3)])
        made.pool.forget(key)
    keys = [made.pool.begin({}, seed) for seed in (5, 6, 5)]
    made.replies(*keys)
    together = [[], [], []]
    for _ in range(3):
        for key in keys:
            made.step(key, "x")
        for answers, reply in zip(together, made.replies(*keys), strict=True):
            answers.append(reply.answer.messages)
    assert together == [alone[0], alone[1], alone[0]]
    assert len({answer for answers in alone for answer in answers}) == 6
    assert len(alone[0][0].split()) == 5


def test_random_state_of_torch():
    """Torch's numbers go on where they were, like those of `random`, and differ between seeds."""
    states = [RandomState(1), RandomState(2)]
    numbers = [[], []]
    for n in (0, 1, 1, 0):
        states[n].load()
        numbers[n].append((random.random(), float(torch.rand(()))))
        states[n].save()
    for seed, expected in zip((1, 2), numbers, strict=True):
        torch.manual_seed(seed)
        random.seed(seed)
        assert [(random.random(), float(torch.rand(()))) for _ in range(2)] == expected
    assert numbers[0] != numbers[1]


# --- recorded conversations -------------------------------------------------------------------------


def recorded(*texts):
    """History of a conversation named `a`."""
    history = [AnsweredCall(None, Answer([{"role": "user", "content": "a 7"}]))]
    for n, text in enumerate(texts):
        content = " | ".join(texts[: n + 1])
        history.append(AnsweredCall(turn(text, n), Answer([{"role": "user", "content": content}], n + 1.0)))
    return history


def test_a_recorded_conversation_goes_on(talk):
    """Its recorded turns are asked again; the reply is the last recorded answer."""
    made = talk()
    key = made.begin("a", history=recorded("x", "y"))
    assert made.replies(key)[0].answer == recorded("x", "y")[-1].answer
    assert len(made.log("a", "step")) == 2
    assert made.text(made.answer(key, "z")) == "x | y | z"
    beginning = made.begin("a", history=recorded())
    assert made.text(made.replies(beginning)[0]) == "a 7"


def test_an_environment_that_has_drifted(talk):
    """Another answer than the recorded one, in `reset` or in a step; and a failure is no drift."""
    made = talk()
    other_reset = [AnsweredCall(None, Answer()), *recorded("x")[1:]]
    other_step = [*recorded("x"), AnsweredCall(turn("y", 1), Answer([{"role": "user", "content": "x | q"}], 2.0))]
    other_reward = [*recorded()]
    other_reward.append(recorded("x")[1]._replace(answer=dataclasses.replace(recorded("x")[1].answer, reward=None)))
    keys = [made.begin("a", history=history) for history in (other_reset, other_step, other_reward, recorded("raise"))]
    reset, step, reward, failed = made.replies(*keys)
    assert [reply.drifted for reply in (reset, step, reward, failed)] == [True, True, True, False]
    assert reset.error.startswith(
        'answered otherwise in reset when recorded turns were repeated: messages = [{"role": "user", "content": '
        '"a 7"}], recorded was []; '
    )
    assert 'to turn 2 when recorded turns were repeated: messages = ...r", "content": "x | y"}]' in step.error
    assert 'recorded was ...r", "content": "x | q"}];' in step.error
    assert "reward = 1.0, recorded was null" in reward.error
    assert failed.error.endswith('raise KeyError("answer") (while its recorded turns were repeated)')


def test_an_environment_that_drifts_after_a_death(talk):
    """It answers with the time: the caller is told instead of the answer to the next turn."""
    made = talk()
    guilty, drifting, again = made.begun("guilty", "drifting", "again")
    made.answer(drifting, "now")
    made.answer(again, "x")
    failed = made.answer(guilty, "os._exit")
    assert failed.error.startswith("ended its process")
    drifted = made.answer(drifting, "x")
    assert (drifted.answer, drifted.drifted) == (None, True)
    assert "to turn 1 when recorded turns were repeated" in drifted.error
    assert made.text(made.answer(again, "y")) == "x | y"


def test_a_reply_of_a_forgotten_conversation_is_nobody_s(talk):
    """One that was being answered, and one whose reply lay there. Their keys are not used again."""
    made = talk("Async")
    a, b, c = made.begun("a", "b", "c")
    made.step(a, "wait 0.2")
    made.when("a", "step")
    made.step(b, "x")
    made.when("b", "stepped")
    made.pool.wait(5)
    made.pool.forget(a)
    made.pool.forget(b)
    made.step(c, "wait 0.3")
    assert made.says(c) == ["wait 0.3"]
    assert not made.log("a", "stepped"), "it was cancelled"
    made.when("a", "close")
    assert made.begun("d") not in (a, b, c)
    with pytest.raises(AssertionError, match="forgotten"):
        made.step(a, "x")


def test_a_forgotten_call_that_has_not_begun_is_not_made(talk):
    made = talk()
    a, b = made.begun("a", "b")
    made.step(a, "sleep 0.4")
    made.when("a", "step")
    made.step(b, "x")
    made.pool.forget(b)
    made.replies(a)
    made.when("b", "close")
    assert made.text(made.answer(a, "y")) == "sleep 0.4 | y"
    assert not made.log("b", "step")


def test_a_result_of_another_call_is_dropped(talk):
    """The worker's messages carry the number of the call, which a result of an earlier process would not have."""
    made = talk()
    key = made.begun("a")
    made.step(key, "sleep 0.3")
    made.when("a", "step")
    (thread,) = made.pool._workers
    thread._take(thread._worker, CallResult(key, 1, Answer("of another call")))
    assert made.says(key) == ["sleep 0.3"]
    assert made.text(made.answer(key, "x")) == "sleep 0.3 | x"


# --- the end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Sync", "Async"])
def test_closing_closes_the_objects(talk, name, monkeypatch):
    """Of conversations that are forgotten, that rest, and that wait for an answer, though one fails to close."""
    monkeypatch.setattr(worker_thread, "CLOSE_SECONDS", 60.0)
    made = talk(name)
    forgotten, _, _, waiting = made.begun("forgotten", "resting", "fails to close", "waiting")
    made.step(waiting, "sleep 0.5" if name == "Sync" else "wait 60")
    made.when("waiting", "step")
    made.pool.forget(forgotten)
    start = time.monotonic()
    made.pool.close()
    assert time.monotonic() - start < 30, "a call that waits is cancelled"
    closed = [made.log(who, "close") for who in made.names.values()]
    assert list(map(len, closed)) == [1, 1, 1, 1]


def test_closing_ends_all_at_once(talk, tmp_path, monkeypatch):
    """While a call hangs, one waits, and a process starts. No thread and no process is left."""
    monkeypatch.setattr(worker_thread, "CLOSE_SECONDS", 0.1)
    monkeypatch.setenv("MADE_BY_TEST", str(tmp_path))
    threads = set(threading.enumerate())
    made = talk("Async", seconds=600.0, workers=3)
    hanging, waiting = made.begun("hanging", "waiting")
    made.step(hanging, "family")
    made.step(waiting, "wait 600")
    made.when("hanging", "step")
    made.when("waiting", "step")
    made.begin("starting")
    assert len(set(threading.enumerate()) - threads) == 3
    assert len(processes_of(tmp_path)) >= 5, "two pairs of processes, and a program"
    start = time.monotonic()
    made.pool.close()
    assert time.monotonic() - start < 6
    assert set(threading.enumerate()) == threads
    assert not processes_of(tmp_path)


def processes_of(mark):
    """Running processes that have inherited the variable."""
    return [path for path in Path("/proc").glob("[0-9]*/environ") if _has(path, f"MADE_BY_TEST={mark}".encode())]


def _has(path, text):
    try:
        return text in path.read_bytes()
    except OSError:
        return False
