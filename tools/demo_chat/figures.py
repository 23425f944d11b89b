"""What the chat demo has reached: figures of test data with their intervals, paired differences, and the texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from megarlhf.algo.intervals import Estimate, mean_of
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.terminal.progress import format_number
from tools.demo.pipeline import evaluations
from tools.demo_chat.pipeline import MODELS, RELEASED, RM, SFT
from tools.demo_chat.tasks import CHECKS, judge, task_of

Row = Mapping[str, Any]
FIGURES: Mapping[str, Mapping[str, str]] = {
    "test": {
        "eval_tools.demo_chat.tasks:checks": "checks that hold",
        "eval_accuracy": "answers that are right",
        "finished_fraction": "answers that end by themselves",
        "response_length_mean": "tokens of an answer",
    },
    "drift": {
        "eval_perplexity": "perplexity of the released model's answers",
        "eval_tools.demo_chat.drift:unchanged": "unrelated answers that are as released",
    },
}
"""By evaluation, its figures and what they say."""
SHARES = (
    *CHECKS,
    "checks that hold",
    "answers that are right",
    "answers that end by themselves",
    "unrelated answers that are as released",
)
"""Of these words, which are said in per cent."""
DIFFERENCES = (("sft", "released"), ("ppo", "sft"), ("grpo", "sft"))
"""A model, and the one that it began with."""
COMPARED = {
    "eval_tools.demo_chat.tasks:checks": "checks that hold",
    "eval_tools.demo_chat.tasks:right": "answers that are right",
}
"""Figures of the test prompts of which models are compared prompt by prompt."""
OF_TRAINING = ("kl_k3", "rollout_logprob_gap_max", "reward_mean", "entropy", "seconds_certificate")


def figures(
    root: Path, names: Sequence[str] = MODELS, differences: Sequence[tuple[str, str]] = DIFFERENCES
) -> dict[str, Any]:
    """What the pipeline under `root` reached; `names`: of models and of the runs that have made them."""
    return {
        "models": {name: tested(root, name) for name in names},
        "checks": {name: checked(root, name) for name in names},
        "differences": {f"{name} over {before}": difference(root, name, before) for name, before in differences},
        "reward_model_pair_accuracy": evaluations(root / RM.name)[-1]["eval_pair_accuracy"],
        "training": {name: of_training(root / name) for name in names if name not in (RELEASED, SFT.name)},
    }


def tested(root: Path, name: str) -> dict[str, Any]:
    """The figures of a model on the test prompts and on the released model's answers, with their intervals."""
    found: dict[str, Any] = {}
    for what, wanted in FIGURES.items():
        known = json.loads((root / f"{what}-{name}" / "eval.json").read_text())["figures"]
        found |= {
            words: {key: known[metric][key] for key in ("value", "low", "high")} for metric, words in wanted.items()
        }
    return found


def checked(root: Path, name: str) -> dict[str, Any]:
    """By check, of which share of a model's answers to test prompts it holds, with the interval."""
    answers = by_prompt(responses(root, "test", name)).values()
    judged = [[judge(task_of(row), row["response"]) for row in rows] for rows in answers]
    return {
        check: as_tree(mean_of(torch.tensor([fmean(each[check] for each in rows) for rows in judged])))
        for check in CHECKS
    }


def said(words: str, value: float) -> str:
    """A value of a figure, such as `41.8%`."""
    return f"{value:.1%}" if words in SHARES else format_number(value)


def of_training(run: Path) -> dict[str, Any]:
    """Of an `rl` run: of its last step, and the largest gap between trainer and engine of all."""
    rows = [row for row in read_metrics(run) if row["step"]]
    found = {name: rows[-1].get(name) for name in OF_TRAINING}
    return found | {
        "steps": rows[-1]["step"],
        "rollout_logprob_gap_max": max(
            row["rollout_logprob_gap_max"] for row in rows if "rollout_logprob_gap_max" in row
        ),
        "certificates": sum("seconds_certificate" in row for row in rows),
        "peak_memory_gib": max(row["peak_memory_gib"] for row in rows),
    }


def difference(root: Path, name: str, before: str) -> dict[str, Any]:
    """By figure of the test prompts, the mean of the differences prompt by prompt."""
    return {
        words: as_tree(mean_of(torch.tensor(paired(rewards_of(root, name, metric), rewards_of(root, before, metric)))))
        for metric, words in COMPARED.items()
    }


def rewards_of(root: Path, name: str, metric: str) -> list[tuple[str, float]]:
    """What a reward says of the answers to each test prompt, in the mean, with the prompt."""
    answers = by_prompt(responses(root, "test", name))
    reward = metric.removeprefix("eval_")
    return [(prompt, fmean(row["rewards"][reward] for row in rows)) for prompt, rows in answers.items()]


def by_prompt(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """In the order of prompts."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["prompt"], []).append(row)
    return found


def paired(values: Sequence[tuple[str, float]], before: Sequence[tuple[str, float]]) -> list[float]:
    """Raises: ValueError where they are not of the same prompts."""
    if [prompt for prompt, _ in values] != [prompt for prompt, _ in before]:
        raise ValueError("two models were tested on different prompts: remove their test-... folders and start again")
    return [value - other for (_, value), (_, other) in zip(values, before, strict=True)]


def as_tree(estimate: Estimate) -> dict[str, Any]:
    return vars(estimate)


def responses(root: Path, what: str, name: str) -> list[dict[str, Any]]:
    """Of an evaluation, in the order of its prompts."""
    return read_lines(root / f"{what}-{name}" / "responses.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
