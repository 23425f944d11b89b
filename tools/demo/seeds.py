"""`make demo-seeds`: the demo for several seeds, with every advantage and loss, and controls.

Choices (when a run stops) are made on the validation prompts or on the KL; the figures are of the test prompts, which
nothing else reads. A control permutes the rewards over the samples of each step, so that they say nothing about the
responses; its PPO has lambda 1, since at less than that the values of a critic that was made from the reward model
enter the advantages. Responses drawn in slices are compared with whole ones after equally many steps, with more seeds.
What has been run is kept: the command goes on where it was stopped. Writes benchmarks/results/demo.json, the figures
that README and docs state.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.terminal.progress import make_console, table
from megarlhf.runtime import capabilities
from tools.demo.pipeline import ACTOR, BY_NAME, evaluations, make_data, run_timed, stage_command, write_json

RESULTS = Path("benchmarks/results/demo.json")
CONTROL_STEPS = 30
_RULE = "rewards=[{kind: rule, rule: exact_match}]"
_IN_REWARD = ("algo.kl.placement=reward", "algo.kl.estimator=k1", "algo.kl.coef=0.05")

VARIANTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ppo, learned reward": ("ppo", ()),
    "ppo": ("ppo", (_RULE,)),
    "reinforce": ("grpo", ("algo.advantage=reinforce", *_IN_REWARD)),
    "reinforce++": ("grpo", ("algo.advantage=reinforce++", *_IN_REWARD)),
    "reinforce++_baseline": ("grpo", ("algo.advantage=reinforce++_baseline", "algo.kl.estimator=k2")),
    "remax": ("grpo", ("algo.advantage=remax", *_IN_REWARD)),
    "rloo": ("grpo", ("algo.advantage=rloo", *_IN_REWARD)),
    "grpo": ("grpo", ("algo.loss_average=sequence",)),
    "dr_grpo": ("grpo", ("algo.advantage=dr_grpo", "algo.loss_average=constant")),
    "dapo": ("grpo", ("algo.clip_high=0.28", "algo.dynamic_sampling.max_refills=3", "algo.kl.coef=0")),
    "gspo": ("grpo", ("algo.policy_loss=gspo",)),
    "cispo": ("grpo", ("algo.policy_loss=cispo",)),
    "sapo": ("grpo", ("algo.policy_loss=sapo",)),
    "control: ppo": ("ppo", (_RULE, "algo.lam=1", "algo.shuffle_rewards=true", f"train.num_steps={CONTROL_STEPS}")),
    "control: grpo": ("grpo", ("algo.shuffle_rewards=true", f"train.num_steps={CONTROL_STEPS}")),
}
"""By name: the demo's stage, and what differs from its configuration."""

SLICES, SAME_STEPS = 3, 40
SEEDS, SLICED_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)
_SAME = (f"train.num_steps={SAME_STEPS}", "train.stop.max_kl=null")
_SLICED = (*_SAME, f"rollout.slices={SLICES}")
SLICED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "grpo, whole": ("grpo", ("algo.loss_average=sequence", *_SAME)),
    "grpo, in slices": ("grpo", ("algo.loss_average=sequence", *_SLICED)),
    "ppo, whole": ("ppo", (_RULE, *_SAME)),
    "ppo, in slices": ("ppo", (_RULE, *_SLICED)),
}
"""Like `VARIANTS`: responses drawn whole and in slices, without a limit of the KL."""
PARTS = ("advantages", "slices")

T_90 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}
"""Student's t, two-sided, 90%, by the number of values (degrees of freedom and one)."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""The same, 95%."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run every seed; a failing stage ends it with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", help="of the advantages (default: 0 1 2)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="of the advantages (default: all)")
    text = "default: both; the advantages, where seeds or variants are given"
    parser.add_argument("--parts", nargs="+", choices=PARTS, help=text)
    parser.add_argument("--root", type=Path, default=Path("runs/demo-seeds"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    parts = options.parts or (PARTS[:1] if options.seeds or options.variants else PARTS)
    found: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    console = make_console()
    if "advantages" in parts:
        chosen = {name: VARIANTS[name] for name in options.variants or VARIANTS}
        by_seed = {str(seed): run_seed(options.root / str(seed), seed, chosen) for seed in options.seeds or SEEDS}
        summary = {name: summary_of(name, by_seed) for name in chosen}
        found |= {"about": about(), "seeds": by_seed, "summary": summary}
        columns = ("sft", "test", "gain", "low", "high", "kl", "steps")
        rows = [[name, *(each[column] for column in columns)] for name, each in summary.items()]
        title = "test accuracy, means over seeds; 95% interval of the gain over SFT"
        console.print(table(title, rows, ("variant", *columns)))
    if "slices" in parts:
        by_seed = {str(seed): run_seed(options.root / str(seed), seed, SLICED) for seed in SLICED_SEEDS}
        differences = {name: difference_of(name, by_seed) for name in ("grpo", "ppo")}
        found["slices"] = {"about": about(), "seeds": by_seed, "differences": differences}
        columns = ("whole", "in slices", "difference", "low", "high", "kl whole", "kl in slices")
        rows = [[name, *(each[column] for column in columns)] for name, each in differences.items()]
        title = f"test accuracy after {SAME_STEPS} steps, whole and in {SLICES} slices; 90% interval of the difference"
        console.print(table(title, rows, ("variant", *columns)))
    write_json(options.out, found)
    return 0


def run_seed(root: Path, seed: int, variants: Mapping[str, tuple[str, tuple[str, ...]]]) -> dict[str, Any]:
    """SFT, reward model, and every variant from them; the figures they reached."""
    console = make_console()
    overrides = [f"run.seed={seed}"]
    if not (root / "data/prompts_test.jsonl").exists():
        run_timed(console, f"seed {seed}: data", make_data(root, seed))
    for name in ("sft", "rm"):
        if not (root / name / "FINISHED").exists():
            run_timed(console, f"seed {seed}: {name}", stage_command(BY_NAME[name], root, overrides))
    found: dict[str, Any] = {
        "sft": accuracy(console, root, root / ACTOR, f"seed {seed}: sft"),
        "reward_model_pairs": evaluations(root / "rm")[-1]["eval_pair_accuracy"],
    }
    for variant, (stage, changes) in variants.items():
        name = folder_of(variant)
        if not (root / name / "FINISHED").exists():
            command = stage_command(BY_NAME[stage], root, [*overrides, *changes], run=name)
            run_timed(console, f"seed {seed}: {variant}", command)
        rows = [row for row in read_metrics(root / name) if row["step"]]
        found[variant] = {
            "test": accuracy(console, root, root / name / "checkpoints/latest/actor", f"seed {seed}: {variant}"),
            "validation": evaluations(root / name)[-1]["eval_accuracy"],
            "kl": rows[-1]["kl_k3"],
            "steps": rows[-1]["step"],
            # A step whose samples earlier ones have drawn whole has no gap.
            "rollout_logprob_gap_max": max(row.get("rollout_logprob_gap_max", 0.0) for row in rows),
        }
    return found


def folder_of(variant: str) -> str:
    """The run directory of a variant."""
    return "".join(letter if letter.isalnum() or letter in "+_" else "-" for letter in variant)


def accuracy(console: Any, root: Path, model: Path, title: str) -> float:
    """Right greedy answers to the test prompts, by `megarlhf eval`."""
    run = model.parents[2] / "test"
    if not (run / "FINISHED").exists():
        data = {"train": str(root / "data/prompts_test.jsonl"), "max_prompt_tokens": 16}
        tree = {
            "run": {"dir": str(run), "on_existing": "overwrite", "nproc": 2},
            "actor": {"model": {"path": str(model)}},
            "data": data,
            "rollout": {"max_response_tokens": 6},
            "rewards": [{"kind": "rule", "rule": "exact_match"}],
        }
        config = model.parents[2] / "test.json"  # JSON is YAML
        write_json(config, tree)
        run_timed(console, f"{title}: test", [sys.executable, "-m", "megarlhf", "eval", "-c", str(config)])
    return float(read_metrics(run)[-1]["eval_exact_match"])


def summary_of(variant: str, by_seed: Mapping[str, Any]) -> dict[str, float | None]:
    """Means over seeds, and the 95% interval of the gain over SFT, by Student's t over the seeds' own differences."""
    gains = [each[variant]["test"] - each["sft"] for each in by_seed.values()]
    half = T_95[len(gains)] * stdev(gains) / len(gains) ** 0.5 if len(gains) in T_95 else None
    rows = [each[variant] for each in by_seed.values()]
    return {
        "sft": mean(each["sft"] for each in by_seed.values()),
        "test": mean(row["test"] for row in rows),
        "gain": mean(gains),
        "low": None if half is None else mean(gains) - half,
        "high": None if half is None else mean(gains) + half,
        "kl": mean(row["kl"] for row in rows),
        "steps": mean(row["steps"] for row in rows),
    }


def difference_of(name: str, by_seed: Mapping[str, Any]) -> dict[str, float]:
    """Means over seeds of an algorithm with whole responses and in slices, and the 90% interval of the difference, by
    Student's t over the seeds' own differences."""
    whole, sliced = ([each[f"{name}, {how}"] for each in by_seed.values()] for how in ("whole", "in slices"))
    differences = [ours["test"] - theirs["test"] for ours, theirs in zip(sliced, whole, strict=True)]
    half = T_90[len(differences)] * stdev(differences) / len(differences) ** 0.5
    return {
        "whole": mean(row["test"] for row in whole),
        "in slices": mean(row["test"] for row in sliced),
        "difference": mean(differences),
        "low": mean(differences) - half,
        "high": mean(differences) + half,
        "kl whole": mean(row["kl"] for row in whole),
        "kl in slices": mean(row["kl"] for row in sliced),
    }


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
