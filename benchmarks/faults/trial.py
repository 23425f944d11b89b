"""One fault of one run: what is there when it has happened, and what the same command then makes of it."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.faults.bank_records import read_bank
from benchmarks.faults.processes import Command
from benchmarks.faults.record import Result
from benchmarks.faults.runs import Case, Reference, Site, contents, differences, has_step, results, rows
from megarlhf.resume.points.point import Position, find_points

_PARTIAL = re.compile(r"\.step_(\d+)(?:_update_(\d+))?\.partial")
_FROM = re.compile(r"from\s+resume/step_(\d+)(?:_update_(\d+))?")
_WENT_ON = re.compile(r"(\d+) conversations go on behind their last answered turn")
_TAKEN = re.compile(r"step (\d+): (\d+) of \d+ responses are in the rollout bank")


class NotHappened(Exception):
    """The fault came too late or too early: another moment is tried."""


class CannotHappen(Exception):
    """Not on this machine; says why."""


@dataclass(frozen=True)
class Left:
    """What a run has left behind."""

    newest: Position | None
    """Its newest resume point."""
    reached: Position
    """How far it was known to be."""
    bank: Mapping[int, int]
    """Finished responses by step, from 1."""
    conversations: Mapping[int, int]
    """Unfinished conversations with an answered turn by step, from 1."""


@dataclass
class Trial:
    """A run directory of its own, for one fault."""

    site: Site
    case: Case
    random: random.Random
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    moments: tuple[int, int] | None = None
    """Steps between which the fault happens; None: anywhere in the run."""
    run: Path = Path()
    commands: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.run = self.folder / "run"

    @property
    def reference(self) -> Reference:
        return self.site.reference(self.case)

    def start(self, *overrides: str, environment: Mapping[str, str] | None = None) -> Command:
        """The command, the same each time but for what is given here."""
        argv = [*self.case.argv(self.run, self.folder / "run.yaml"), *self.overrides, *overrides]
        output = self.folder / f"output{len(self.commands)}.txt"
        planted = {**self.environment, "FAULTS_PLANTED": str(self.folder / "planted"), **(environment or {})}
        self.commands.append(Command(argv, output, planted))
        return self.commands[-1]

    def wait_for_moment(self, command: Command, first: int = 0) -> str:
        """A random moment of the run, after at least `first` of its steps; says which.

        Raises: NotHappened when the command has ended by then.
        """
        steps, part = self.random.randrange(*self.moments or (first, self.case.steps)), self.random.random()
        reference = self.reference
        there = command.wait_until((self.run / "lock").exists) and command.wait_until(
            partial(has_step, self.run, steps)
        )
        if there:
            time.sleep(part * (reference.seconds_of_a_step if steps else reference.seconds_to_first_step))
        if not there or command.status is not None or (self.run / "FINISHED").exists():
            raise NotHappened("the command had ended")
        return f"{part:.2f} of a step after {steps} steps"

    def require_unfinished(self) -> None:
        """Raises: NotHappened when the run is at its end all the same."""
        if (self.run / "FINISHED").exists():
            raise NotHappened("the run had finished")

    def left(self) -> Left:
        """What is there now."""
        points = find_points(self.run)
        partial_points = (_PARTIAL.fullmatch(path.name) for path in (self.run / "resume").glob(".step_*"))
        begun = [Position(int(match[1]), int(match[2] or 0)) for match in partial_points if match]
        newest = points[-1].position if points else None
        bank = read_bank(self.run)
        return Left(
            newest,
            max(
                [
                    Position(max([row["step"] for row in rows(self.run)], default=0)),
                    *begun,
                    *([newest] if newest else []),
                ]
            ),
            bank.finished,
            bank.num_open,
        )

    def updates(self, position: Position | None) -> int:
        """Optimizer updates of the whole run up to there."""
        train = self.case.tree["train"]
        each = 1
        if "prompts_per_step" in train:
            samples = train["prompts_per_step"] * self.case.tree["rollout"]["num_samples_per_prompt"]
            each = train["epochs_per_step"] * samples // train["mini_batch_samples"]
        return 0 if position is None else position.step * each + position.update

    def goes_on(
        self,
        happened: str,
        *overrides: str,
        allowed: int | None = None,
        status: int = 0,
        not_compared: Sequence[str] = (),
    ) -> Result:
        """The same command once more: it has to end as the run that nothing happened to, from the newest point.

        `allowed`: how many updates may be done again at most; None: all that no resume point had.
        `not_compared`: parts of names of metrics that may differ
        """
        before = self.left()
        command = self.start(*overrides)
        ended = command.wait()
        said = command.said
        result = Result(happened, recovered=False, metrics_equal=False)
        if ended != status:
            result.problem = f"the command ended with {ended}: {said[-600:]}"
            return result
        match = _FROM.search(said)
        resumed = Position(int(match[1]), int(match[2] or 0)) if match else None
        result.steps_lost = self.updates(before.reached) - self.updates(resumed)
        result.beyond_promise = max(0, self.updates(before.newest) - self.updates(resumed))
        if allowed is not None:
            result.beyond_promise = max(0, result.steps_lost - allowed)
        result.beyond_promise += self._drawn_again(before, resumed, said)
        if before.conversations:
            result.notes["conversations"] = _went_on(said)
        result.problem = differences(results(self.run), self.reference.results, not_compared)
        result.metrics_equal = not result.problem
        if left_over := command.left_over(15):
            result.problem = f"processes were left running: {left_over}"
        if result.beyond_promise:
            result.problem += f"; resumed from {resumed}, there were {before}"
        result.recovered = not result.problem
        return result

    def _drawn_again(self, before: Left, resumed: Position | None, said: str) -> int:
        """Responses that were in the bank and not taken from it, though their step was sampled, and conversations that
        did not go on behind their last answered turn."""
        taken = {int(step): int(number) for step, number in _TAKEN.findall(said)}
        first = 1 if resumed is None else resumed.step + 1 + (resumed.update > 0)
        responses = sum(max(0, number - taken.get(step, 0)) for step, number in before.bank.items() if step >= first)
        conversations = sum(number for step, number in before.conversations.items() if step >= first)
        return responses + max(0, conversations - _went_on(said))

    def refused(self, why: str, *overrides: str) -> str:
        """A start that has to be refused, with everything as it was; returns what is wrong with that."""
        before = contents(self.run)
        command = self.start(*overrides)
        status = command.wait()
        if status != 2:
            return f"status {status} instead of 2: {command.said[-600:]}"
        if why not in " ".join(command.said.split()):
            return f"the message does not say {why!r}: {command.said[-600:]}"
        changed = sorted(dict(contents(self.run).items() ^ before.items()))
        return f"the refused start has changed {changed}" if changed else ""

    def went_on(
        self,
        command: Command,
        happened: str,
        expected: Reference | None = None,
        not_compared: Sequence[str] = (),
    ) -> Result:
        """The command, to its end, which has to be that of the run that nothing happened to.

        `not_compared`: parts of names of metrics that may differ
        """
        status = command.wait()
        result = Result(happened, recovered=False, metrics_equal=False)
        if status != 0:
            result.problem = f"the command ended with {status}: {command.said[-600:]}"
            return result
        result.problem = differences(results(self.run), (expected or self.reference).results, not_compared)
        result.metrics_equal = result.recovered = not result.problem
        return result

    def metric(self, name: str) -> float:
        """Summed over all steps."""
        lines = (self.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return sum(json.loads(line).get(name, 0) or 0 for line in lines)

    def end(self) -> None:
        """Nothing is left running, nor lying about where all went well."""
        for command in self.commands:
            command.stop()


def _went_on(said: str) -> int:
    """Conversations that went on behind their last answered turn."""
    return sum(int(number) for number in _WENT_ON.findall(" ".join(said.split())))
