"""The chat demo's stages as the commands a user would type, and what has been done of them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import commit_of_sources
from megarlhf.observe.records.run_directory import FINISHED_FILE
from tools.demo.pipeline import Stage, call, run_timed, stage_command, write_json

DEMO = "demo-chat"
DEFAULT_ROOT = Path("runs") / DEMO
ACTOR = "sft/checkpoints/latest/actor"
REWARD_MODEL = "rm/checkpoints/latest/reward_model"
OF_SFT = {"actor.model.path": ACTOR}
WITH_PROMPTS = {"data.train": "data/prompts.jsonl", "data.validation": "data/validation.jsonl"}
LEARNED = {"critic.model.path": REWARD_MODEL, "reward_model.model.path": REWARD_MODEL}


def _stage(name: str, command: str, paths: dict[str, str], lists: dict[str, tuple[str, ...]] | None = None) -> Stage:
    return Stage(name, command, paths, DEMO, lists or {})


REPLAY = _stage("replay", "generate", {"data.train": "data/replay_questions.jsonl", "out": "data/replay.jsonl"})
SFT = _stage(
    "sft",
    "sft",
    {"data.validation": "data/sft_validation.jsonl"},
    {"data.train": ("data/sft.jsonl", REPLAY.paths["out"])},
)
PAIRS = _stage(
    "pairs", "generate", OF_SFT | {"data.train": "data/pairs.jsonl", "out": "data/chosen_and_rejected.jsonl"}
)
RM = _stage("rm", "rm", {"reward_model.model.path": ACTOR}, {"data.train": (PAIRS.paths["out"], "data/spoiled.jsonl")})
PPO = _stage("ppo", "rl", OF_SFT | LEARNED | WITH_PROMPTS)
GRPO = _stage("grpo", "rl", OF_SFT | WITH_PROMPTS)
STAGES = (REPLAY, SFT, PAIRS, RM, PPO, GRPO)
ANSWERS = _stage("answers", "generate", {"data.train": "data/questions.jsonl", "out": "data/answers.jsonl"})
TEST = _stage("test", "eval", {"data.train": "data/test.jsonl"})
DRIFT = _stage("drift", "eval", {"data.train": "data/drift.jsonl"})
RELEASED = "released"
MODELS = (RELEASED, SFT.name, PPO.name, GRPO.name)
"""What is tested: the model that `make pretrained` has made, and those of stages."""
WRITES = {**{each.paths["out"]: each.name for each in (REPLAY, PAIRS)}, DRIFT.paths["data.train"]: ANSWERS.name}
"""Data that is made by a stage, and the stage."""
RESUME_POINTS = ("checkpoint.every_minutes=3", "checkpoint.keep=1")
"""A run of 5 to 12 minutes would have none by the default; and two of each run would be 15 GB in place of 8."""
SECONDS, COMMITS, CHANGES = "seconds.json", "commits.json", "changes.json"
SEEDS = (5, 6, 7)
"""Of the figures; settings were chosen on the seeds before. `make demo-chat` has the first."""
NAMES = ("data", *(stage.name for stage in (*STAGES, ANSWERS, TEST, DRIFT)))
"""What an override may be for."""
COMMON = {"run.seed": "--seed", "run.dir": "--root", "run": "--seed or --root, or one key as run.key=value"}
"""What an override may not change, and the option that does."""


@dataclass(frozen=True)
class Overrides:
    """What differs from the configurations: `section.key=value` in every stage that trains, `STAGE:section.key=value`
    in one; `data:test=8` is a number of records."""

    given: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises: ValueError for a stage that there is not, and for what all stages must have in common."""
        for each in self.given:
            name, colon, key = each.partition("=")[0].partition(":")
            if (key or name) in COMMON:
                raise ValueError(f"{each}: it is of all stages and of the data; give {COMMON[key or name]}")
            if colon and name not in NAMES:
                raise ValueError(f"{each}: there is no stage {name!r}; name one of {', '.join(NAMES)}, or none for all")

    def of(self, stage: str, *, trains: bool = False) -> list[str]:
        """Of one stage."""
        own = [each.partition(":")[2] for each in self.given if each.startswith(f"{stage}:")]
        return [*(each for each in self.given if trains and ":" not in each.partition("=")[0]), *own]


Planned = tuple[Stage, Sequence[str], str]
"""A stage, what differs from its configuration, and the name of the run."""


@dataclass(frozen=True)
class Runner:
    """Runs what has not been finished yet."""

    root: Path
    console: Console
    model: Path
    """The released one."""
    seed: int = SEEDS[0]
    overrides: Overrides = Overrides()
    call: Callable[[Sequence[str]], int] = call
    """Runs a command and returns its exit status."""
    keeps_resume_points: bool = True
    """Of runs that have finished: each has the optimizer's state, four times the model's size."""

    def model_of(self, name: str) -> Path:
        """The released one, or the actor of a run."""
        return self.model if name == RELEASED else self.root / f"{name}/checkpoints/latest/actor"

    def run(self, stage: Stage, changes: Sequence[str] = (), name: str | None = None) -> None:
        """Unless it has finished; a run that was stopped goes on. `name`: of the run, where it is not the stage's.

        Raises: SystemExit with the stage's exit status when it fails; ValueError as `require_current`.
        """
        run = name or stage.name
        self.require_current([(stage, changes, run)])
        if self.has_finished(run):
            self.console.print(f"{self.root / run}: finished before; remove it to run it again")
            return
        command = self.command(stage, changes, run)
        self.note_start(run, changes)
        # A run that was stopped goes on: its seconds are those of all starts.
        before = self.seconds().get(run, 0.0) if (self.root / run).exists() else 0.0
        started = time.monotonic()
        try:
            run_timed(self.console, run, command, self.call)
        finally:
            self.keep_seconds(run, round(before + time.monotonic() - started, 1))
        if not self.keeps_resume_points:
            shutil.rmtree(self.root / run / "resume", ignore_errors=True)

    def command(self, stage: Stage, changes: Sequence[str], run: str) -> list[str]:
        """As a user would type it; `run`: the run's folder. What has been there goes on where it can."""
        trains = stage.command not in ("generate", "eval")
        own = [f"run.seed={self.seed}"]
        own += ["run.on_existing=resume", *RESUME_POINTS] if trains else []
        own += [f"actor.model.path={self.model}"] if stage in (REPLAY, SFT, ANSWERS) else []
        own += self.overrides.of(stage.name, trains=trains)
        return stage_command(stage, self.root, [*own, *changes], run=run)

    def has_finished(self, run: str) -> bool:
        return (self.root / run / FINISHED_FILE).exists()

    def require_current(self, planned: Sequence[Planned]) -> None:
        """`planned`: in the order in which they run, where more are asked for than one, all that these are made from.

        Raises: ValueError where a run that has finished is not that of its sources any more, or has lost what it
        wrote, which names all that have to be removed; or where one was begun with other changes.
        """
        old: dict[str, str] = {}
        again: set[str] = set()
        for stage, changes, run in planned:
            self._require_same(run, changes)
            if self.has_finished(run):
                sources = self._sources(stage, changes)
                out = stage.paths.get("out")
                if new := [each for each in sources if each in again or self._is_newer(each, run)]:
                    old[run] = f"{run} was made from another {new[0]}"
                elif out is not None and not (self.root / out).exists():
                    old[run] = f"{self.root / out} is gone, which {run} has made"
            if run in old or not self.has_finished(run):
                again.add(run)
        if old:
            folders = " ".join(str(self.root / run) for run in old)
            raise ValueError(f"{'; '.join(old.values())}. To make it again, remove {folders}")

    def _sources(self, stage: Stage, changes: Sequence[str]) -> list[str]:
        """The runs from which the stage's is made."""
        read = [path for key, path in stage.paths.items() if key != "out"]
        read += [path for paths in stage.lists.values() for path in paths]
        paths = [Path(each.partition("=")[2]) for each in changes if each.startswith("actor.model.path=")]
        read += [str(path.relative_to(self.root)) for path in paths if path.is_relative_to(self.root)]
        return [WRITES.get(path, path.partition("/")[0]) for path in read]

    def _is_newer(self, source: str, run: str) -> bool:
        made = [self.root / each / FINISHED_FILE for each in (source, run)]
        return made[0].exists() and made[0].stat().st_mtime > made[1].stat().st_mtime

    def _require_same(self, run: str, changes: Sequence[str]) -> None:
        began, now = self._kept(CHANGES).get(run), self._told(changes)
        if (self.root / run).exists() and began is not None and began != now:
            raise ValueError(f"{self.root / run} was begun with {began}; now {now}: remove it to run it again")

    def _told(self, changes: Sequence[str]) -> list[str]:
        """Wherever the root is."""
        return [each.replace(f"{self.root}/", "") for each in changes]

    def note_start(self, run: str, changes: Sequence[str]) -> None:
        """Of which commit, and with which changes."""
        before = self._kept(COMMITS).get(run, []) if (self.root / run).exists() else []
        self._keep(COMMITS, run, list(dict.fromkeys([*before, commit_of_sources()])))
        self._keep(CHANGES, run, self._told(changes))

    def keep_seconds(self, name: str, seconds: float) -> None:
        self._keep(SECONDS, name, seconds)

    def seconds(self) -> dict[str, float]:
        """By run, of all its starts that did not end by SIGKILL of this process."""
        return self._kept(SECONDS)

    def commits(self, of: Callable[[str], bool]) -> list[str]:
        """With which the runs of these names were started, also to go on, each once."""
        return list(dict.fromkeys(each for name, known in self._kept(COMMITS).items() if of(name) for each in known))

    def _keep(self, file: str, name: str, value: float | list[str]) -> None:
        write_json(self.root / file, self._kept(file) | {name: value})

    def _kept(self, file: str) -> dict[str, Any]:
        path = self.root / file
        return json.loads(path.read_text()) if path.exists() else {}
