"""Faults among conversations with an environment: kills in the middle of turns, and environments that fail."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from benchmarks.faults.bank_records import read_bank
from benchmarks.faults.environments import EXIT_STATUS, FAULT_FILE
from benchmarks.faults.planted_faults import with_problem
from benchmarks.faults.random_faults import kill
from benchmarks.faults.record import Result
from benchmarks.faults.runs import has_step, plant
from benchmarks.faults.trial import NotHappened, Trial

OF_ENGINE = ("gap", "correction")
"""Parts of names of metrics that contain the engine's own log-probs, which another engine rounds otherwise."""
REDRAWN = "conversations_redrawn"
MOST_THIRD_TURNS = 8
"""Most unfinished conversations whose third turn is waited for."""
TURN_SECONDS = 0.1
"""About the time in which an answer is given and the next turn is drawn."""
SECONDS_PER_STEP = 3


def sigkill_third_turn(trial: Trial) -> Result:
    """SIGKILL while third turns of unfinished conversations are in the bank, which go on behind their last turn."""
    return _gone_on(trial.goes_on(_kill_at_third_turn(trial)))


def sigkill_other_engine(trial: Trial) -> Result:
    """The same, and one engine of two ranks goes on where there were two engines. Conversations, rewards and weights
    are equal; the engine's own log-probs need not be."""
    happened = _kill_at_third_turn(trial)
    result = _gone_on(trial.goes_on(happened, "rollout.parallel.tp=2", not_compared=OF_ENGINE))
    if "rollout engines of 2 rank(s)" not in " ".join(trial.commands[-1].said.split()):
        result = with_problem(result, "it went on with other engines than one of two ranks")
    return result


def environment_drifts(trial: Trial) -> Result:
    """SIGKILL, and the environment answers a repeated turn otherwise, once: its conversation begins anew."""
    file = _fault_file(trial)
    happened = _kill_at_third_turn(trial)
    answered = [talk for talk in read_bank(trial.run, newest=True).conversations if talk.num_answered]
    talk = trial.random.choice(answered)
    turn = trial.random.randrange(talk.num_answered)
    _write(file, f"answers_otherwise {talk.seed} {turn}")
    result = _gone_on(trial.goes_on(f"{happened}; turn {turn + 1} was answered otherwise", not_compared=[REDRAWN]))
    reason = f"answered otherwise to turn {turn + 1} when recorded turns were repeated"
    return _redrawn_once(trial, result, file, reason)


def environment_killed(trial: Trial) -> Result:
    """A process of the environment is killed at any moment: its conversations are repeated in another one."""
    command = trial.start()
    moment = trial.wait_for_moment(command)
    workers: dict[int, int] = {}
    if not command.wait_until(lambda: workers.update(command.environment_workers()) or workers):
        raise NotHappened("the run ended before it had an environment")
    ((worker, supervisor),) = workers.items()
    which = trial.random.choice(["worker", "supervisor"])
    command.kill([worker if which == "worker" else supervisor])
    if not command.wait_until(lambda: command.environment_workers().keys() - {worker}):
        raise NotHappened("no conversation came after that")
    result = trial.went_on(command, f"the {which} was killed {moment}", not_compared=[REDRAWN])
    if result.metrics_equal:
        result.notes["redrawn"] = trial.metric(REDRAWN)
    return result


def environment_hangs(trial: Trial) -> Result:
    """One call of an environment does not return; it blocks its process, or waits for ever beside others."""
    kind = trial.random.choice(["blocks", "waits"])
    return _fails_once(trial, kind, f"took longer than {SECONDS_PER_STEP} s")


def environment_exits(trial: Trial) -> Result:
    """One call of an environment ends its process."""
    return _fails_once(trial, "exits", f"ended its process with status {EXIT_STATUS}")


def engine_exception_talks(trial: Trial) -> Result:
    """vLLM raises in the middle of conversations: it is built anew, and they go on behind their last answered turn."""
    call = 10 + trial.random.randrange(300)
    command = trial.start(environment=plant(f"vllm.v1.engine.llm_engine:LLMEngine.step:{call}:raise:0"))
    if not command.wait_until((trial.folder / "planted").exists):
        raise NotHappened("fewer calls")
    talks = [talk for talk in read_bank(trial.run, newest=True).conversations if talk.num_answered]
    if not talks:
        raise NotHappened("no conversation had an answered turn")
    happened = f"LLMEngine.step raised in call {call}, in the middle of {len(talks)} conversations"
    result = trial.went_on(command, happened)
    if result.recovered and trial.metric("engine_rebuilds") != 1:
        result = with_problem(result, f"{trial.metric('engine_rebuilds')} engines were built anew")
    return result


# --- parts of them --------------------------------------------------------------------------------


def _kill_at_third_turn(trial: Trial) -> str:
    """Kill a rank or all processes in the middle of conversations; says how many had an answered third turn."""
    command = trial.start()
    steps, number = trial.random.randrange(trial.case.steps), trial.random.randrange(1, MOST_THIRD_TURNS + 1)

    def has_third_turns() -> bool:
        time.sleep(0.005)  # the bank is read as a whole
        return read_bank(trial.run, newest=True).third_turns >= number

    if not command.wait_until(partial(has_step, trial.run, steps)) or not command.wait_until(has_third_turns):
        raise NotHappened("the run ended before a third turn was answered")
    time.sleep(trial.random.random() * TURN_SECONDS)
    victim = kill(trial, command)
    bank = read_bank(trial.run, newest=True)
    if not bank.third_turns:
        raise NotHappened("conversations with a third turn were over")
    step, still_open = bank.conversations[0].step, len(bank.conversations)
    return f"{victim} in step {step}: {bank.third_turns} of {still_open} unfinished conversations had a third turn"


def _gone_on(result: Result) -> Result:
    """The result, if it was said that conversations went on behind their last answered turn."""
    if result.metrics_equal and not result.notes.get("conversations"):
        return with_problem(result, "no conversation went on behind its last answered turn")
    return result


def _fault_file(trial: Trial) -> Path:
    file = trial.folder / "environment_fault"
    trial.environment[FAULT_FILE] = str(file)
    return file


def _write(file: Path, text: str) -> None:
    """Write a file at once: the environment may look at any moment."""
    file.with_suffix(".new").write_text(text, encoding="utf-8")
    file.with_suffix(".new").rename(file)


def _fails_once(trial: Trial, kind: str, reason: str) -> Result:
    """An environment fails at a random moment, once."""
    file = _fault_file(trial)
    trial.overrides = (f"environment.seconds_per_step={SECONDS_PER_STEP}",)
    command = trial.start()
    moment = trial.wait_for_moment(command)
    _write(file, kind)
    result = trial.went_on(command, f"a call of an environment {kind} {moment}", not_compared=[REDRAWN])
    return _redrawn_once(trial, result, file, reason)


def _redrawn_once(trial: Trial, result: Result, file: Path, reason: str) -> Result:
    """The result, if the fault of the file happened, was named, and made one conversation begin anew."""
    if not file.with_name(f"{file.name}.happened").exists():
        raise NotHappened("no environment was asked")
    if not result.metrics_equal:
        return result
    said = " ".join(trial.commands[-1].said.split())
    result.notes["redrawn"] = redrawn = trial.metric(REDRAWN)
    if reason not in said or "the environment of sample" not in said or "begins anew" not in said:
        result = with_problem(result, f"it does not say {reason!r}: {said[-600:]}")
    if redrawn != 1:
        result = with_problem(result, f"{redrawn} conversations began anew, expected 1")
    return result
