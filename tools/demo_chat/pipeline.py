"""The chat demo's stages as the commands a user would type, and the figures that they leave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from megarlhf.observe.run_directory import FINISHED_FILE
from tools.demo.pipeline import Stage, run_timed, stage_command
from tools.pretrained import directory

DEMO = "demo-chat"
DEFAULT_ROOT = Path("runs") / DEMO
ACTOR = "sft/checkpoints/latest/actor"
REWARD_MODEL = "rm/checkpoints/latest/reward_model"
OF_SFT = {"actor.model.path": ACTOR}
WITH_PROMPTS = {"data.train": "data/prompts.jsonl", "data.validation": "data/validation.jsonl"}
LEARNED = {"critic.model.path": REWARD_MODEL, "reward_model.model.path": REWARD_MODEL}


def _stage(name: str, command: str, paths: dict[str, str]) -> Stage:
    return Stage(name, command, paths, DEMO)


SFT = _stage("sft", "sft", {"data.train": "data/sft.jsonl", "data.validation": "data/sft_validation.jsonl"})
PAIRS = _stage("pairs", "generate", OF_SFT | {"data.train": "data/pairs.jsonl", "out": "data/chosen_and_rejected.jsonl"})
RM = _stage("rm", "rm", {"reward_model.model.path": ACTOR, "data.train": "data/chosen_and_rejected.jsonl"})
PPO = _stage("ppo", "rl", OF_SFT | LEARNED | WITH_PROMPTS)
GRPO = _stage("grpo", "rl", OF_SFT | WITH_PROMPTS)
STAGES = (SFT, PAIRS, RM, PPO, GRPO)
ANSWERS = _stage("answers", "generate", {"data.train": "data/questions.jsonl", "out": "data/answers.jsonl"})
TEST = _stage("test", "eval", {"data.train": "data/test.jsonl"})
DRIFT = _stage("drift", "eval", {"data.train": "data/answers.jsonl"})
MODELS = {
    "released": "",
    "sft": ACTOR,
    "ppo": "ppo/checkpoints/latest/actor",
    "grpo": "grpo/checkpoints/latest/actor",
}
"""By name, what is tested, relative to the root; the first is where `make pretrained` put it."""


def model_of(root: Path, name: str) -> Path:
    return directory() if name == "released" else root / MODELS[name]


@dataclass(frozen=True)
class Runner:
    """Runs what has not been finished yet."""

    root: Path
    console: Console
    overrides: Sequence[str] = ()
    """For every stage."""

    def run(self, stage: Stage, changes: Sequence[str] = (), name: str | None = None) -> None:
        """Raises: SystemExit with the stage's exit status when it fails."""
        where = self.root / (name or stage.name)
        if (where / FINISHED_FILE).exists():
            self.console.print(f"{where}: finished before; remove it to run it again")
            return
        command = stage_command(stage, self.root, [*self.overrides, *changes], run=name)
        run_timed(self.console, name or stage.name, command)


def tested(root: Path, name: str) -> dict[str, Any]:
    """The figures of a model on the test prompts and on the released model's answers, with their intervals."""
    return {what: json.loads((root / f"{what}-{name}" / "eval.json").read_text()) for what in ("test", "drift")}
