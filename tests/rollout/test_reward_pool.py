"""Users' reward functions in worker processes: every form, and everything that they may do wrong.

The functions stand in a module that the test writes. Not covered: what a run makes of results
(tests/trainers/test_rewards.py).
"""

import os
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from megarlhf.rollout.rewards.batch import RewardBatch, RewardResult
from megarlhf.rollout.rewards.forms import form_of
from megarlhf.rollout.rewards.pool import RewardPool
from megarlhf.rollout.rewards.rules import load_rule

MODULE = '''
import asyncio, os, sys, time
from megarlhf.rollout.rewards.batch import TokenRewards

def length(prompt, response, fields):
    return len(response)

def as_batch(batch):
    return [len(response) + fields["bonus"] for response, fields in zip(batch.responses, batch.fields)]

async def slow(prompt, response, fields):
    await asyncio.sleep(0.1)
    return len(prompt)

async def slow_batch(batch):
    await asyncio.sleep(0.01)
    return [1.0 if finished else None for finished in batch.finished]

def parts(prompt, response, fields):
    return {"a": 1.0, "b": len(response)}

def scored(prompt, response, fields):
    return {"score": 5, "a": 1.0}

def of_tokens(batch):
    return [TokenRewards([float(token) for token in tokens]) for tokens in batch.response_tokens]

def second(prompt, response, fields):
    """Fails for the second response in the way that its prompt names."""
    if response != "bb":
        return 1.0
    if prompt == "raise":
        raise KeyError("answer")
    if prompt == "exit":
        sys.exit(3)
    if prompt == "crash":
        os.kill(os.getpid(), 11)
    if prompt == "hang":
        time.sleep(600)
    if prompt == "noise":
        print("noise " * 10000)
        return 2.0

async def hangs(prompt, response, fields):
    await asyncio.sleep(0 if response != "bb" else 600)
    return 1.0

def generator(batch):
    yield 1.0

def two(asked, said):
    return 1.0

class Judge:
    def __call__(self, prompt, response, fields):
        return 7.0

judge = Judge()
'''


def batch(prompt="p", responses=("a", "bb", "ccc")):
    n = len(responses)
    return RewardBatch(
        prompts=[prompt] * n,
        responses=list(responses),
        prompt_tokens=[[1]] * n,
        response_tokens=[list(range(len(response))) for response in responses],
        finished=[True, False, True][:n],
        fields=[{"bonus": 10 * k} for k in range(n)],
        messages=[None] * n,
        samples=list(range(4, 4 + n)),
    )


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Outcomes of a function of the module for a batch."""
    (tmp_path / "users_rewards.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    pools = []

    def call(name, rows=None, **options) -> list[RewardResult]:
        rule = f"users_rewards:{name}"
        pool = RewardPool(rule, form_of(load_rule(rule)), **{"workers": 1, "timeout_seconds": 20.0, **options})
        pools.append(pool)
        return pool.start(rows or batch()).wait()

    yield call
    for pool in pools:
        pool.close()


def values(results):
    assert not [result.error for result in results if result.error]
    return [result.value for result in results]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("length", [1, 2, 3]),
        ("as_batch", [1, 12, 23]),
        ("slow", [1, 1, 1]),
        ("slow_batch", [1, None, 1]),
        ("parts", [2, 3, 4]),
        ("scored", [5, 5, 5]),
        ("judge", [7, 7, 7]),
    ],
)
def test_every_form_of_a_function(ask, name, expected):
    """One by one or a batch, waited for or not; None does not apply; components add up unless one is the score."""
    assert values(ask(name)) == expected


def test_components_and_rewards_of_tokens(ask):
    assert ask("parts")[1].components == {"a": 1.0, "b": 2.0}
    found = ask("of_tokens")
    assert [result.token_values for result in found] == [(0.0,), (0.0, 1.0), (0.0, 1.0, 2.0)]


def test_async_calls_wait_together_and_workers_share(ask):
    """160 calls of a tenth of a second, sixteen at once; batches of one row over three processes."""
    start = time.monotonic()
    assert values(ask("slow", many(160))) == [1] * 160
    assert time.monotonic() - start < 14, "one after the other takes 16 s"
    assert values(ask("as_batch", workers=3, batch_samples=1)) == [1, 12, 23]


def many(count):
    one = batch(responses=("x",))
    return one.part([0] * count)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("raise", "raised KeyError: 'answer'; {module}:33: raise KeyError(\"answer\")"),
        ("exit", "raised SystemExit: 3; a function must return, not exit; {module}:35: sys.exit(3)"),
        ("crash", "ended its process by signal 11 (SIGSEGV)"),
        ("hang", "took longer than 0.5 s"),
    ],
)
def test_what_a_function_does_wrong_is_said_of_its_sample_only(ask, tmp_path, prompt, words):
    """The samples before and after it have their rewards; a worker that is gone is replaced. Wrong values are in
    test_rules.py and test_reward_calls.py."""
    first, failed, last = ask("second", batch(prompt), timeout_seconds=0.5 if prompt == "hang" else 20.0)
    assert (first.value, last.value) == (1.0, 1.0)
    assert words.format(module=tmp_path / "users_rewards.py") in failed.error
    assert failed.value is None


def test_an_async_call_that_hangs_stops_alone(ask):
    first, failed, last = ask("hangs", timeout_seconds=0.5)
    assert (first.value, failed.error, last.value) == (1.0, "took longer than 0.5 s", 1.0)


def test_what_is_printed_does_not_disturb(ask):
    assert values(ask("second", batch("noise"))) == [1.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [("generator", "it is a generator"), ("two", r"its parameters are \(asked, said\): 2 have to be given")],
)
def test_a_function_of_another_form_is_refused(ask, tmp_path, name, words):
    with pytest.raises(ValueError, match=words):
        ask(name)


def test_tries_again_after_a_hang(ask, tmp_path):
    """A function that hangs the first time only, by a file that it leaves."""
    flag = tmp_path / "seen"
    (tmp_path / "flaky.py").write_text(
        f"import pathlib, time\ndef rule(prompt, response, fields):\n    flag = pathlib.Path({str(flag)!r})\n"
        "    if not flag.exists():\n        flag.touch()\n        time.sleep(600)\n    return 4.0\n"
    )
    pool = RewardPool("flaky:rule", form_of(load_rule("flaky:rule")), workers=1, timeout_seconds=1.0, retries=1)
    assert values(pool.start(batch(responses=("a",))).wait()) == [4.0]
    pool.close()
    flag.unlink()
    once = RewardPool("flaky:rule", form_of(load_rule("flaky:rule")), workers=1, timeout_seconds=0.5)
    assert once.start(batch(responses=("a",))).wait()[0].error == "took longer than 0.5 s"
    once.close()


def test_waiting_can_be_given_up_and_nothing_is_left(ask):
    """Asked to stop, `wait` returns None at once; closing ends the workers, hanging ones too."""
    rule = "users_rewards:second"
    pool = RewardPool(rule, form_of(load_rule(rule)), workers=1, timeout_seconds=60.0)
    pending = pool.start(batch("hang"))
    start = time.monotonic()
    assert pending.wait(lambda: time.monotonic() - start > 0.3) is None
    assert time.monotonic() - start < 30
    pool.close()
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"rewards.worker" in _read(path)]
    mine = [path for path in running if f"PPid:\t{os.getpid()}" in (path.parent / "status").read_text()]
    assert not mine


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_system_that_starts_no_process_is_a_failure_and_the_pool_goes_on(ask, monkeypatch):
    """Nobody would wait for ever: the first sample has failed, the others are rewarded."""
    popen, calls = subprocess.Popen, []

    def busy(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", busy)
    found = ask("length")
    assert "could not be called: BlockingIOError" in found[0].error
    assert [result.value for result in found[1:]] == [2.0, 3.0]
