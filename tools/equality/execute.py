"""The runs of one version: made by its command line, or taken from an earlier comparison."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import yaml

from tools.equality.compare import METRICS_RENAMED, Numbers, emptiness, read_numbers, with_new_names
from tools.equality.runs import ComparedRun, Config, merged
from tools.equality.trees import RENAMED, CodeTree, in_keys_of

INSIDE_A_STEP = re.compile(r"step_\d+_update_\d+")
"""The name of a resume point that was written between two optimizer updates of a step."""
LAST_CHARACTERS = 1500
"""What is shown of the output of a command that has failed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run of one version."""

    label: str
    seconds: float
    """0 of one that was made for an earlier comparison."""
    problems: list[str]
    numbers: Numbers | None

    def timing(self) -> str:
        return f"{self.label} {self.seconds:.0f} s" if self.seconds else f"{self.label} kept"

    def require_numbers(self) -> Numbers:
        """Of a run without problems."""
        assert self.numbers is not None, self.problems
        return self.numbers


@dataclass(frozen=True)
class ComparedVersion:
    """A version's files, and a folder for what its runs write and for their numbers."""

    label: str
    folder: Path
    tree: CodeTree
    surroundings: str
    """A digest of inputs and libraries."""
    reuse: bool
    """Whether numbers of an earlier comparison count, where nothing that decides about them has changed."""

    @cached_property
    def pages(self) -> str:
        return self.tree.pages()

    def outcome(self, run: ComparedRun) -> Outcome:
        """The run's numbers, made now where there are none."""
        start, problems, seconds = time.monotonic(), [], 0.0
        numbers = self._kept(run)
        if numbers is None:
            problems = list(self._make(run))
            seconds = time.monotonic() - start
            if not problems:
                try:
                    numbers = read_numbers(self.directory(run))
                except (OSError, ValueError) as error:
                    problems = [f"its metrics cannot be read: {error}"]
        if numbers is not None:
            compared = with_new_names(numbers, METRICS_RENAMED)
            problems = list(emptiness(compared, last_step=run.last_step, shows=run.shows))
            if seconds and not problems:
                self._keep(run, numbers)
            numbers = compared
        return Outcome(label=self.label, seconds=seconds, problems=problems, numbers=numbers)

    def _file(self, run: ComparedRun) -> Path:
        return self.folder / "numbers" / f"{run.name}.json"

    def _kept(self, run: ComparedRun) -> Numbers | None:
        """Numbers of an earlier comparison, where nothing that decides about them has changed since."""
        if not self.reuse or not self._file(run).exists():
            return None
        kept = json.loads(self._file(run).read_text(encoding="utf-8"))
        return Numbers(**kept["numbers"]) if kept["digest"] == self._digest(run) else None

    def _keep(self, run: ComparedRun, numbers: Numbers) -> None:
        self._file(run).parent.mkdir(exist_ok=True)
        text = json.dumps({"digest": self._digest(run), "numbers": asdict(numbers)}, indent=1)
        self._file(run).write_text(text, encoding="utf-8")

    def _digest(self, run: ComparedRun) -> str:
        """Of everything that decides about the run's numbers but the version; not of where it is made."""
        stated = [run.command, self._config(run), run.kill_at, run.plain, self.surroundings]
        text = json.dumps(stated, sort_keys=True).replace(str(self.tree.inputs), "INPUTS")
        return hashlib.sha256(text.replace(str(self.directory(run)), "RUN").encode()).hexdigest()

    def _config(self, run: ComparedRun) -> Config:
        """The run's configuration in this version's keys."""
        return in_keys_of(self.pages, merged(run.config, {"run": {"dir": str(self.directory(run))}}), RENAMED)

    def directory(self, run: ComparedRun) -> Path:
        """Its run directory."""
        return self.folder / "runs" / run.name / "run"

    def _make(self, run: ComparedRun) -> Iterator[str]:
        """Give the command, twice where it is killed. Yields what goes wrong, in words."""
        directory = self.directory(run)
        shutil.rmtree(directory.parent, ignore_errors=True)
        directory.parent.mkdir(parents=True)
        log, file = directory.parent / "output.txt", directory.parent / "config.yaml"
        file.write_text(yaml.safe_dump(self._config(run), sort_keys=False), encoding="utf-8")
        if run.kill_at is None:
            yield from self._command(run, log)
            return
        yield from self._command(run, log, until=directory / run.kill_at)
        before = (directory / "metrics.jsonl").read_bytes() if (directory / "metrics.jsonl").exists() else b""
        log = log.with_name("output_resumed.txt")
        yield from self._command(run, log)
        if not INSIDE_A_STEP.search(log.read_text(encoding="utf-8", errors="replace")):
            yield f"the second start did not go on inside a step: {_end_of(log)}"
        if not before or not (directory / "metrics.jsonl").read_bytes().startswith(before):
            yield "the second start did not keep the rows of the steps before the kill: it began anew"

    def _command(self, run: ComparedRun, log: Path, until: Path | None = None) -> Iterator[str]:
        """Give the command once. Yields how it ended, where that is not as it should."""
        folder = self.directory(run).parent
        argv, ranks = [run.command, "-c", str(folder / "config.yaml")], run.config["run"]["nproc"]
        processes = self.tree.start(argv, log, folder / "cache", ranks, plain=run.plain)
        if problem := processes.wait(until):
            yield f"{problem}: {_end_of(log)}"


def _end_of(log: Path) -> str:
    """The last output of a command, in one line for each of its own."""
    text = log.read_text(encoding="utf-8", errors="replace")[-LAST_CHARACTERS:].strip()
    return f"{log}\n    " + text.replace("\n", "\n    ")
