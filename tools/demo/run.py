"""`make demo`: data, SFT, reward model, PPO and GRPO on the shipped task, then a table and a report.

Figures go to runs/demo/summary.json, curves to runs/demo/report.html.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megarlhf.observe.report.page import write_report
from megarlhf.observe.terminal.progress import make_console, table
from tools.demo.pipeline import (
    DEFAULT_ROOT,
    STAGES,
    evaluations,
    figures,
    make_data,
    run_timed,
    stage_command,
    write_json,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages in order; a failing stage ends it with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="where everything is written")
    parser.add_argument("--seed", type=int, default=0, help="of data, weights, order and samples")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every training stage")
    options = parser.parse_args(argv)
    root, console = options.root, make_console()
    seconds = {"data": run_timed(console, "data", make_data(root, options.seed))}
    for stage in STAGES:
        command = stage_command(stage, root, [f"run.seed={options.seed}", *options.overrides])
        seconds[stage.name] = run_timed(console, stage.name, command)
    write_json(root / "summary.json", figures(root, seconds))
    write_report([root / stage.name for stage in STAGES], root / "report.html", title="megarlhf demo: two-digit sums")
    console.rule("[bold]before and after")
    console.print(table("held-out figures", before_and_after(root), ("stage", "figure", "before", "after")))
    console.print(f"{sum(seconds.values()):.0f} s in all; {root / 'summary.json'}, {root / 'report.html'}")
    return 0


def before_and_after(root: Path) -> list[tuple[str, str, float, float]]:
    """Rows of the closing table."""
    rows = []
    for run, metric, words in (
        ("sft", "eval_perplexity", "perplexity of right answers"),
        ("rm", "eval_pair_accuracy", "pairs ranked rightly"),
        ("ppo", "eval_reward_mean", "learned reward"),
        ("ppo", "eval_accuracy", "sums that are right"),
        ("grpo", "eval_accuracy", "sums that are right"),
    ):
        history = evaluations(root / run)
        rows.append((run, words, history[0][metric], history[-1][metric]))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
