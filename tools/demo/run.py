"""`make demo`: data, SFT, reward model, PPO and GRPO on the shipped task, then a table and a report.

Every stage is the command a user would type, with the configurations in configs/demo/. Figures go to
runs/demo/summary.json, curves to runs/demo/report.html.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarlhf.observe.metrics import read_metrics
from megarlhf.observe.progress import make_console, table
from megarlhf.observe.report import write_report

ROOT = Path("runs/demo")
STAGES: tuple[tuple[str, Sequence[str]], ...] = (
    ("data", ["-m", "tools.demo.make_data", "--out", str(ROOT / "data")]),
    ("sft", ["-m", "megarlhf", "sft", "-c", "configs/demo/sft.yaml"]),
    ("rm", ["-m", "megarlhf", "rm", "-c", "configs/demo/rm.yaml"]),
    ("ppo", ["-m", "megarlhf", "rl", "-c", "configs/demo/ppo.yaml"]),
    ("grpo", ["-m", "megarlhf", "rl", "-c", "configs/demo/grpo.yaml"]),
)
RUNS = ("sft", "rm", "ppo", "grpo")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages in order; returns the first failing stage's exit status."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--overrides", nargs="*", default=[], help="section.key=value for every training stage")
    overrides = arguments.parse_args(argv).overrides
    console = make_console()
    seconds: dict[str, float] = {}
    for name, command in STAGES:
        console.rule(f"[bold]{name}")
        started = time.monotonic()
        extra = overrides if name in RUNS else []
        if status := subprocess.call([sys.executable, *command, *extra]):
            console.print(f"[red]stage {name} failed with exit status {status}; its output stands above")
            return status
        seconds[name] = round(time.monotonic() - started, 1)
    summary = summarise(seconds)
    (ROOT / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report([ROOT / run for run in RUNS], ROOT / "report.html", title="megarlhf demo: two-digit sums")
    console.rule("[bold]before and after")
    console.print(table("held-out figures", before_and_after(), ("stage", "figure", "before", "after")))
    console.print(
        f"{sum(seconds.values()):.0f} s in all; figures: {ROOT / 'summary.json'}; curves: {ROOT / 'report.html'}"
    )
    return 0


def summarise(seconds: dict[str, float]) -> dict[str, Any]:
    """The figures that others read. Accuracies are held-out, 0 to 1."""
    last = {run: _evaluations(run)[-1] for run in RUNS}
    return {
        # PPO starts from the SFT model: its first evaluation, before any training, is SFT's accuracy.
        "sft_accuracy": _evaluations("ppo")[0]["eval_accuracy"],
        "sft_perplexity": last["sft"]["eval_perplexity"],
        "reward_model_accuracy": last["rm"]["eval_pair_accuracy"],
        "ppo_accuracy": last["ppo"]["eval_accuracy"],
        "ppo_kl": read_metrics(ROOT / "ppo")[-1]["kl"],
        "grpo_accuracy": last["grpo"]["eval_accuracy"],
        "grpo_kl": read_metrics(ROOT / "grpo")[-1]["kl"],
        "seconds": seconds,
    }


def _evaluations(run: str) -> list[dict[str, Any]]:
    """The lines of a run in which the held-out data was looked at."""
    return [row for row in read_metrics(ROOT / run) if any(name.startswith("eval_") for name in row)]


def before_and_after() -> list[tuple[str, str, float, float]]:
    """Rows of the closing table."""
    rows = []
    for run, metric in (
        ("sft", "eval_perplexity"),
        ("rm", "eval_pair_accuracy"),
        ("ppo", "eval_accuracy"),
        ("ppo", "eval_reward_mean"),
        ("grpo", "eval_accuracy"),
    ):
        found = _evaluations(run)
        rows.append((run, metric, found[0][metric], found[-1][metric]))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
