"""`make demo-3d`: the PPO stage of the demo at TP2 x PP2 on four processes.

Every role at TP2 x PP2, vLLM at TP2. Starts from the demo's SFT and reward models; makes what is missing. On two
cores four processes share them, so a few steps are shown, not the whole run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megarlhf.observe.metrics import read_metrics
from megarlhf.observe.progress import make_console, table
from tools.demo.run import ROOT, STAGES

NEEDED = {"data": ROOT / "data/base", "sft": ROOT / "sft/checkpoints/latest", "rm": ROOT / "rm/checkpoints/latest"}
RUN_DIR = Path("runs/demo/ppo_3d")


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=10, help="rollout-and-train steps")
    steps = arguments.parse_args(argv).steps
    for name, command in STAGES:
        if name in NEEDED and not NEEDED[name].exists() and (status := subprocess.call([sys.executable, *command])):
            return status
    roles = ("actor", "critic", "reward_model")
    layout = [f"{role}.parallel={{tp: 2, pp: 2}}" for role in roles]
    run = [f"run.dir={RUN_DIR}", "run.nproc=4", f"train.num_steps={steps}", "eval.every=0", "rollout.parallel.tp=2"]
    command = [sys.executable, "-m", "megarlhf", "rl", "-c", "configs/demo/ppo.yaml", *layout, *run]
    if status := subprocess.call(command):
        return status
    rows = read_metrics(RUN_DIR)
    shown = ("reward_mean", "kl", "policy_loss", "value_loss", "rollout_logprob_gap_max")
    make_console().print(
        table(
            "PPO at TP2 x PP2", [(name, rows[1].get(name), rows[-1].get(name)) for name in shown], ("", "first", "last")
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
