"""`make demo-seeds`: the whole demo for several seeds, and a control.

The control is PPO and GRPO with the rewards permuted over the samples of each step, so that they say nothing about the
responses. GRPO then has nothing to learn from. PPO's critic starts from the reward model, and at lam < 1 its values
enter the advantages, so that some of what the reward model knows is left. Writes benchmarks/results/demo.json, the
figures that the README states.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarlhf.observe.progress import make_console, table
from megarlhf.runtime import capabilities
from tools.demo.pipeline import BY_NAME, STAGES, evaluations, figures, make_data, run_timed, stage_command, write_json

RESULTS = Path("benchmarks/results/demo.json")
CONTROLS = {"grpo_shuffled": "grpo", "ppo_shuffled": "ppo"}
CONTROL_STEPS = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Run every seed; a failing stage ends it with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--root", type=Path, default=Path("runs/demo-seeds"))
    options = parser.parse_args(argv)
    figures_by_seed = {str(seed): run_seed(options.root / str(seed), seed) for seed in options.seeds}
    write_json(RESULTS, {"about": about(), "seeds": figures_by_seed})
    console = make_console()
    columns = ("sft_accuracy", "reward_model_accuracy", "ppo_accuracy", "ppo_kl", "grpo_accuracy", *CONTROLS)
    rows = [[seed, *(figure[column] for column in columns)] for seed, figure in figures_by_seed.items()]
    console.print(table("held-out figures by seed", rows, ("seed", *columns)))
    return 0


def run_seed(root: Path, seed: int) -> dict[str, Any]:
    """The pipeline and its controls; the figures they reached."""
    console = make_console()
    overrides = [f"run.seed={seed}"]
    seconds = {"data": run_timed(console, f"seed {seed}: data", make_data(root, seed))}
    for stage in STAGES:
        command = stage_command(stage, root, overrides)
        seconds[stage.name] = run_timed(console, f"seed {seed}: {stage.name}", command)
    result = figures(root, seconds)
    for control, stage_name in CONTROLS.items():
        shuffled = [*overrides, "algo.shuffle_rewards=true", f"train.num_steps={CONTROL_STEPS}"]
        command = stage_command(BY_NAME[stage_name], root, shuffled, run=control)
        run_timed(console, f"seed {seed}: {control}", command)
        result[control] = evaluations(root / control)[-1]["eval_accuracy"]
    return result


def about() -> dict[str, Any]:
    """What a figure names: commit, machine, versions, command."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False)
    return {
        "command": "make demo-seeds",
        "commit": commit.stdout.strip() + (" with local changes" if dirty.stdout.strip() else ""),
        "machine": f"{platform.machine()}, two ranks of one thread",
        "versions": {name: version for name, version in capabilities().versions.items() if version},
    }


if __name__ == "__main__":
    raise SystemExit(main())
