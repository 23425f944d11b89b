"""The demo's stages as the commands a user would type, and the figures that they leave."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from megarlhf.observe.records.metrics import read_metrics

DEFAULT_ROOT = Path("runs/demo")
"""Where the configurations in configs/demo/ point."""


@dataclass(frozen=True)
class Stage:
    """A stage's command and its configured paths, relative to the root."""

    name: str
    command: str
    paths: dict[str, str]
    demo: str = "demo"
    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Configured lists of paths."""

    @property
    def config(self) -> str:
        return f"configs/{self.demo}/{self.name}.yaml"

    @property
    def root(self) -> Path:
        """Where the configuration points."""
        return Path("runs") / self.demo


def _data(name: str) -> dict[str, str]:
    return {"data.train": f"data/{name}_train.jsonl", "data.validation": f"data/{name}_validation.jsonl"}


ACTOR = "sft/checkpoints/latest/actor"
REWARD_MODEL = "rm/checkpoints/latest/reward_model"
MODELS = {"actor.model.path": ACTOR, "critic.model.path": REWARD_MODEL, "reward_model.model.path": REWARD_MODEL}
STAGES = (
    Stage("sft", "sft", {"actor.model.path": "data/base", **_data("sft")}),
    Stage("rm", "rm", {"reward_model.model.path": ACTOR, **_data("pairs")}),
    Stage("ppo", "rl", MODELS | _data("prompts")),
    Stage("grpo", "rl", MODELS | _data("prompts")),
)
LORA = Stage("grpo-lora", "rl", {"actor.model.path": ACTOR, **_data("prompts")})
"""GRPO with an adapter, beside the demo."""
BY_NAME = {stage.name: stage for stage in STAGES}


def make_data(root: Path, seed: int) -> list[str]:
    """The command that writes the task's files and the untrained model's directory."""
    return [sys.executable, "-m", "tools.demo.make_data", "--out", str(root / "data"), "--seed", str(seed)]


def stage_command(stage: Stage, root: Path, overrides: Sequence[str] = (), run: str | None = None) -> list[str]:
    """`megarlhf COMMAND -c FILE`, with every path moved where the root is not the configured one."""
    moved = [f"run.dir={root / (run or stage.name)}"]
    if root != stage.root:
        moved += [f"{key}={root / path}" for key, path in stage.paths.items()]
        moved += [f"{key}=[{', '.join(str(root / each) for each in paths)}]" for key, paths in stage.lists.items()]
    return [sys.executable, "-m", "megarlhf", stage.command, "-c", stage.config, *moved, *overrides]


def call(command: Sequence[str]) -> int:
    """Run a command in the foreground; returns its exit status. What asks us to stop is passed on to it."""
    child = subprocess.Popen(command)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in handlers:
        signal.signal(number, lambda received, frame: child.send_signal(received))
    try:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # the terminal has told the child too; wait for it to end
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_timed(
    console: Console, name: str, command: Sequence[str], call: Callable[[Sequence[str]], int] = call
) -> float:
    """Run a stage in the foreground; returns its seconds.

    Raises: SystemExit with the stage's exit status when it fails; its output stands above.
    """
    console.rule(f"[bold]{name}")
    started = time.monotonic()
    if status := call(command):
        console.print(f"[red]stage {name} failed with exit status {status}; its output stands above")
        raise SystemExit(status)
    return round(time.monotonic() - started, 1)


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run in which the held-out data was looked at, the untrained state first."""
    return [row for row in read_metrics(run_dir) if any(name.startswith("eval_") for name in row)]


def figures(root: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """What the pipeline under `root` reached. Accuracies are held-out, 0 to 1."""
    last = {stage.name: evaluations(root / stage.name)[-1] for stage in STAGES}
    rows = {name: read_metrics(root / name) for name in ("ppo", "grpo")}
    gaps = [row.get("rollout_logprob_gap_max", 0.0) for rows_of_run in rows.values() for row in rows_of_run]
    return {
        # PPO starts from the SFT model: its first evaluation, before any training, is SFT's accuracy.
        "sft_accuracy": evaluations(root / "ppo")[0]["eval_accuracy"],
        "reward_model_accuracy": last["rm"]["eval_pair_accuracy"],
        "ppo_accuracy": last["ppo"]["eval_accuracy"],
        "grpo_accuracy": last["grpo"]["eval_accuracy"],
        "sft_perplexity": last["sft"]["eval_perplexity"],
        "ppo_kl": rows["ppo"][-1]["kl"],
        "ppo_steps": rows["ppo"][-1]["step"],
        "ppo_learned_reward": [evaluations(root / "ppo")[0]["eval_reward_mean"], last["ppo"]["eval_reward_mean"]],
        "grpo_kl": rows["grpo"][-1]["kl"],
        "grpo_steps": rows["grpo"][-1]["step"],
        "rollout_logprob_gap_max": max(gaps),
        "seconds": seconds,
    }


def write_json(path: Path, tree: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(tree, indent=2) + "\n")
    partial.replace(path)
