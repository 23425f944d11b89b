"""`make demo-3d`: the PPO stage of the demo at TP2 x PP2 on four processes.

Every role at TP2 x PP2, vLLM at TP2. Starts from the demo's SFT and reward models and makes what is missing. Four
processes on two cores are slow, so a few steps are shown, not the whole run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.terminal.progress import make_console, table
from tools.demo.pipeline import BY_NAME, DEFAULT_ROOT, make_data, run_timed, stage_command

ROLES = ("actor", "critic", "reward_model")


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; a failing stage ends it with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="rollout-and-train steps")
    steps = parser.parse_args(argv).steps
    root, console = DEFAULT_ROOT, make_console()
    if not (root / "data/base").exists():
        run_timed(console, "data", make_data(root, 0))
    for name in ("sft", "rm"):
        if not (root / name / "checkpoints/latest").exists():
            run_timed(console, name, stage_command(BY_NAME[name], root))
    overrides = [f"{role}.parallel={{tp: 2, pp: 2, layers_per_stage: [2, 1]}}" for role in ROLES]
    overrides += ["run.nproc=4", f"train.num_steps={steps}", "eval.every=0"]
    run_timed(console, "ppo at TP2 x PP2", stage_command(BY_NAME["ppo"], root, overrides, run="ppo_3d"))
    rows = [row for row in read_metrics(root / "ppo_3d") if "reward_mean" in row]
    shown = ("reward_mean", "kl", "policy_loss", "value_loss", "rollout_logprob_gap_max", "seconds_train")
    figures = [(name, rows[0][name], rows[-1][name]) for name in shown]
    console.print(table("PPO at TP2 x PP2, four ranks", figures, ("figure", "first step", "last step")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
