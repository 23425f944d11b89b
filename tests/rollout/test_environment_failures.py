"""Everything that users' environments may do wrong: it harms no rank and no other conversation.

The environments stand in environments_for_tests.py and do what a turn's text says; an answer holds all turns so far. A
file has a line for each call. Not covered: signals of a job and all that a process may start (test_reward_processes.py
has the same supervisor), and what a rollout makes of failures.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarlhf.rollout.environments import worker_thread
from megarlhf.rollout.environments.checks import check_environment
from tests.rollout.environment_talk import MODULE, talks
from tests.rollout.test_reward_processes import is_running


@pytest.fixture
def talk(tmp_path):
    yield from talks(tmp_path)


@pytest.mark.parametrize("name", ["Sync", "Async"])
def test_failures_of_a_conversation(talk, name):
    """In words, with the user's line. The worker and the other conversations live on."""
    made = talk(name)
    wrong = {
        "raise": "raised KeyError: 'answer'; ",
        "sys.exit": "raised SystemExit: 3; a function must return, not exit; ",
        "returns 5": "returned 5 from step, expected an Answer; return megarlhf.Answer(...)",
        "returns role": "a message has the role 'assistant', which is not an environment's to write",
        "returns nan": "returned the reward nan, expected a number that fp32 holds, or None",
    }
    good, *keys = made.begun("good", *wrong)
    for key, text in zip(keys, wrong, strict=True):
        made.step(key, text)
    replies = made.replies(*keys)
    for reply, words in zip(replies, wrong.values(), strict=True):
        assert words in reply.error
        assert (reply.answer, reply.late, reply.drifted) == (None, False, False)
    assert replies[0].error.endswith('raise KeyError("answer")')
    assert "environments_for_tests.py:" in replies[0].error
    assert made.text(made.answer(good, "x")) == "x"
    assert {made.when(each, "close") for each in wrong} == {made.when("good", "step")}, "failed ones are closed"
    with pytest.raises(AssertionError, match="has failed"):
        made.step(keys[0], "x")
    made.pool.forget(keys[0])
    reset, fields = made.replies(made.begin("r", reset="raise"), made.begin("f", of=lambda: None))
    assert reset.error.startswith("raised KeyError: 'answer'; ")
    assert fields.error.startswith("cannot be given its fields: ")


@pytest.fixture
def started(monkeypatch):
    """Commands of processes that are started."""
    commands, popen = [], subprocess.Popen

    def start(command, **options):
        commands.append(command)
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    return commands


@pytest.mark.parametrize(
    "path, words",
    [
        (f"{MODULE}:Missing", "has no function 'Missing'"),
        (f"{MODULE}:NoStep", "has no method step(turn); write one"),
        ("tests.rollout.nowhere:Any", "cannot import tests.rollout.nowhere"),
    ],
)
def test_a_class_that_cannot_be_used(talk, started, path, words):
    """Each conversation is told, also later ones; only one process is started."""
    made = talk(path=path, args={})
    for names in ("ab", "cd"):
        for reply in made.replies(*made.begin(*names)):
            assert reply.error.startswith(f"could not be started: environment '{path}'")
            assert words in reply.error
    assert len(started) == 1


def test_a_module_that_ends_the_process(talk, started, tmp_path, monkeypatch):
    """It might be the machine's fault: three tries, and then no more."""
    monkeypatch.setattr(worker_thread, "START_PAUSES", (0.0, 0.0))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ends_process.py").write_text("import os; os._exit(7)")
    made = talk(path="ends_process:Any", args={})
    for names in ("ab", "cd"):
        for reply in made.replies(*made.begin(*names)):
            assert reply.error.startswith("could not be started: ended its process with status 7")
    assert len(started) == 3


def test_an_object_that_cannot_be_made(talk):
    made = talk("Unmade")
    first, second = (reply.error for reply in made.replies(*made.begin("a", "b")))
    assert first == second
    assert first.startswith("raised OSError: no server; ")


def test_an_async_call_that_takes_too_long_stops_alone(talk):
    """Also one that refuses to be cancelled. Another that waits meanwhile has its answer, and the process stays."""
    made = talk("Async", seconds=1.0)
    hanging, refusing, waiting = made.begun("hanging", "refusing", "waiting")
    made.step(hanging, "wait 600")
    made.step(refusing, "refuse 600")
    made.step(waiting, "wait 0.4")
    late, refused, answered = made.replies(hanging, refusing, waiting)
    assert (late.error, late.late) == ("took longer than 1 s", True)
    assert (refused.error, refused.late) == (late.error, True)
    assert made.text(answered) == "wait 0.4"
    assert made.text(made.answer(waiting, "x")) == "wait 0.4 | x"
    assert made.when("waiting", "step", 2) == made.when("hanging", "step") == made.when("hanging", "close")


def test_an_async_call_does_not_pay_for_others(talk):
    """Others block the process for longer than the limit of a call, none of them for too long by itself."""
    made = talk("Async", seconds=1.0)
    waiting, *blocking = made.begun("waiting", "a", "b", "c")
    made.step(waiting, "waits 0.1")
    for key in blocking:
        made.step(key, "sleep 0.6")
    assert made.says(waiting, *blocking) == ["waits 0.1", *["sleep 0.6"] * 3]


@pytest.mark.parametrize("name", ["Sync", "Async"])
def test_a_call_that_blocks_is_killed_and_others_are_repeated(talk, name):
    """With what it has started. One that was answered, one whose answer was awaited, and one that begins go on in a new
    process, with all they have seen."""
    made = talk(name, seconds=1.0)
    guilty, answered, awaited = made.begun("guilty", "answered", "awaited")
    assert made.text(made.answer(answered, "x")) == "x"
    assert made.text(made.answer(awaited, "y")) == "y"
    made.step(guilty, "family")
    old = made.when("guilty", "step")
    made.step(awaited, "z")
    begins = made.begin("begins")
    late, *others = made.replies(guilty, awaited, begins)
    assert (late.answer, late.error, late.late) == (None, "took longer than 1 s", True)
    assert [made.text(reply) for reply in others] == ["y | z", "begins 7"]
    assert made.text(made.answer(answered, "w")) == "x | w"
    assert not is_running(int((made.folder / "program").read_text()))
    assert made.when("answered", "step", 3) == made.when("awaited", "step", 3) != old
    assert len(made.log("answered", "step")) == 3, "x, x again, and w"
    with pytest.raises(AssertionError, match="has failed"):
        made.step(guilty, "x")


@pytest.mark.parametrize(
    "text, words",
    [
        ("os._exit", "ended its process with status 5; a function must return, not exit"),
        ("crash", "ended its process by signal 11 (SIGSEGV)"),
    ],
)
def test_a_call_that_ends_the_process(talk, text, words):
    made = talk()
    guilty, other = made.begun("guilty", "other")
    made.answer(other, "x")
    made.step(guilty, text)
    made.step(other, "y")
    failed, answered = made.replies(guilty, other)
    assert (failed.error, failed.late) == (words, False)
    assert made.text(answered) == "x | y"
    assert made.when("other", "reset", 2) != made.when("guilty", "step")


def test_a_process_that_ends_while_nobody_s_code_runs(talk):
    """All are repeated, three times; a fourth death is too much. The caller is told when it asks."""
    made = talk("Async")
    a, b = made.begun("a", "b")
    for death in range(1, 5):
        assert made.text(made.answer(a, "x")) == " | ".join("x" * death)
        assert made.text(made.answer(b, "y")) == " | ".join("y" * death)
        os.kill(made.when("a", "reset", death), signal.SIGKILL)
    time.sleep(0.3)
    assert not made.pool.replies()
    c = made.begun("c")
    assert made.when("c", "reset") != made.when("a", "reset", 4)
    failed = made.answer(a, "y")
    assert failed.error == "lost its process 4 times; the last one ended its process by signal 9 (SIGKILL)"
    made.pool.forget(b)
    assert made.text(made.answer(c, "z")) == "z"


def test_a_process_that_hangs_while_nobody_s_code_runs(talk, monkeypatch):
    """A thread that never lets go of the interpreter, the first time only."""
    monkeypatch.setattr(worker_thread, "STUCK_SECONDS", 1.2)
    made = talk(seconds=0.5)
    key = made.begun("a")
    assert made.text(made.answer(key, "once keep")) == "once keep"
    old = made.when("a", "step")
    assert made.when("a", "reset", 2) != old
    assert made.text(made.answer(key, "x")) == "once keep | x"


def test_code_between_two_calls_that_blocks(talk):
    """A task that an environment has left running: the conversation is told when it asks; another is repeated."""
    made = talk("Async", seconds=0.5)
    guilty, other = made.begun("guilty", "other")
    made.answer(guilty, "later sleep 600")
    made.when("other", "reset", 2)
    assert not made.pool.replies()
    failed = made.answer(guilty, "x")
    assert (failed.error, failed.late) == ("took longer than 0.5 s", True)
    assert made.text(made.answer(other, "x")) == "x"


def test_an_environment_that_cancels_all_tasks(talk):
    """Others that wait fail too, but nobody waits for ever."""
    made = talk("Async")
    guilty, waiting, idle = made.begun("guilty", "waiting", "idle")
    made.step(waiting, "wait 600")
    made.when("waiting", "step")
    made.step(guilty, "cancel")
    cancelled, other = made.replies(guilty, waiting)
    assert "cancelled" in cancelled.error
    assert "cancelled" in other.error.lower()
    assert made.text(made.answer(idle, "x")) == "x"


def test_an_event_loop_that_is_stopped_and_an_exit_in_a_task(talk):
    """The process and what waits in it go on."""
    made = talk("Async")
    stopping, exiting, waiting = made.begun("stopping", "exiting", "waiting")
    made.step(waiting, "wait 0.5")
    made.step(stopping, "stop")
    made.step(exiting, "exit_in_task")
    assert made.says(stopping, exiting, waiting) == ["stop", "exit_in_task", "wait 0.5"]
    assert len(made.log("waiting", "reset")) == 1


def test_a_forked_child_that_returns_does_not_answer(talk):
    """Nor does it hide that the parent hangs."""
    made = talk(seconds=1.0)
    key, other = made.begun("a", "other")
    assert made.text(made.answer(key, "fork 0")) == "fork 0"
    assert len(made.log("a", "stepped")) == 2, "the child has returned too"
    assert made.text(made.answer(key, "x")) == "fork 0 | x"
    late = made.answer(other, "fork 600")
    assert (late.error, late.late) == ("took longer than 1 s", True)
    assert len(made.log("other", "stepped")) == 1


# --- checks before a run ----------------------------------------------------------------------------


def test_a_worker_imports_the_standard_library_only():
    """Of its own accord, before it knows the user's module and whether numpy is there."""
    program = (
        "import sys; before = set(sys.modules); import megarlhf.rollout.environments.worker; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'__mp_main__'}))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "['megarlhf']"


def test_a_class_that_fits_is_loaded():
    assert check_environment(f"{MODULE}:Sync", {"folder": "x"}).__name__ == "Sync"
    assert check_environment(f"{MODULE}:Draws", {}).__name__ == "Draws"


@pytest.mark.parametrize(
    "name, args, words",
    [
        ("Missing", {}, "has no function 'Missing'"),
        ("function", {}, "is a function, expected a class with the methods reset(fields, seed) and step(turn); name"),
        ("NoStep", {}, "has no method step(turn); write one"),
        ("OtherStep", {}, "its method step is called as step(turn), which it does not take: too many positional"),
        ("Sync", {}, "cannot be made with the arguments that are given (none): missing a required argument: 'folder'"),
        (
            "Sync",
            {"folder": "", "b": 1},
            "(folder, b): got an unexpected keyword argument 'b'; change environment.args",
        ),
    ],
)
def test_a_class_that_does_not_fit_is_refused(name, args, words):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the words are compared below
        check_environment(f"{MODULE}:{name}", args)
    assert words in str(refused.value)
