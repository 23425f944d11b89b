"""`make demo-chat`: a real language model through SFT, a reward model, PPO and GRPO, with figures of test data.

Goes on where it was stopped: what has finished is not run again. Figures go to runs/demo-chat/summary.json, curves and
samples to runs/demo-chat/report.html.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarlhf.observe.metrics import read_metrics
from megarlhf.observe.progress import make_console, table
from megarlhf.observe.report import write_report
from tools.demo.pipeline import evaluations, run_timed, write_json
from tools.demo_chat.pipeline import ANSWERS, DEFAULT_ROOT, DRIFT, GRPO, MODELS, PPO, RM, SFT, STAGES, TEST
from tools.demo_chat.pipeline import Runner, model_of, tested

FIGURES = {
    "test": {"eval_tools.demo_chat.tasks:checks": "checks that hold", "eval_accuracy": "answers that are right"},
    "drift": {"eval_perplexity": "perplexity of the released model's answers"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages in order; a failing stage ends it with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="where everything is written")
    parser.add_argument("--seed", type=int, default=0, help="of data, order and samples")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every training stage")
    options = parser.parse_args(argv)
    root, console, began = options.root, make_console(), time.monotonic()
    if not (root / "data").exists():
        run_timed(console, "data", make_data(root, options.seed))
    runner = Runner(root, console, (f"run.seed={options.seed}",))
    for stage in STAGES:
        Runner(root, console, (*runner.overrides, *options.overrides)).run(stage)
    test_all(runner, list(MODELS))
    minutes = (time.monotonic() - began) / 60
    found = figures(root)
    write_json(root / "summary.json", found | {"minutes": round(minutes, 1)})
    write_report([root / each.name for each in (SFT, RM, PPO, GRPO)], root / "report.html", title="megarlhf demo: chat")
    console.rule("[bold]test data")
    console.print(table("figures of test data, 95% intervals over prompts", rows_of(found["models"]), HEAD))
    console.print(f"{minutes:.0f} minutes; {root / 'summary.json'}, {root / 'report.html'}")
    return 0


HEAD = ("model", "figure", "value", "from", "to")


def make_data(root: Path, seed: int) -> list[str]:
    return [sys.executable, "-m", "tools.demo_chat.make_data", "--out", str(root / "data"), "--seed", str(seed)]


def test_all(runner: Runner, names: Sequence[str]) -> None:
    """Each model on the test prompts, and on the released model's answers to other questions."""
    runner.run(ANSWERS)
    for name in names:
        change = [f"actor.model.path={model_of(runner.root, name)}"]
        runner.run(TEST, change, name=f"test-{name}")
        runner.run(DRIFT, change, name=f"drift-{name}")


def figures(root: Path) -> dict[str, Any]:
    """What the pipeline under `root` reached."""
    last = {name: [row for row in read_metrics(root / name) if row["step"]][-1] for name in ("ppo", "grpo")}
    return {
        "models": {name: tested(root, name) for name in MODELS},
        "reward_model_pair_accuracy": evaluations(root / "rm")[-1]["eval_pair_accuracy"],
        "kl": {name: row["kl_k3"] for name, row in last.items()},
        "rollout_logprob_gap_max": {name: row["rollout_logprob_gap_max"] for name, row in last.items()},
    }


def rows_of(models: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Of the closing table."""
    rows = []
    for name, of_model in models.items():
        for what, wanted in FIGURES.items():
            for metric, words in wanted.items():
                figure = of_model[what]["figures"][metric]
                rows.append((name, words, figure["value"], figure["low"], figure["high"]))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
