"""GRPO with responses drawn in slices against whole ones: as many steps, from the same SFT model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from megarlhf.observe.records.metrics import read_metrics
from tools.demo.seeds import T_90
from tools.demo_chat.figures import COMPARED, difference, of_training, rewards_of
from tools.demo_chat.pipeline import GRPO, REPLAY, SFT, TEST, Runner
from tools.demo_chat.run import start

SLICES, STEPS = 4, 16
_SAME = (f"train.num_steps={STEPS}", "eval.every=0")
WHOLE, IN_SLICES = "grpo-whole", "grpo-in-slices"
SLICED: Mapping[str, Sequence[str]] = {WHOLE: _SAME, IN_SLICES: (*_SAME, f"rollout.slices={SLICES}")}
"""Runs of GRPO by name, and what differs from its configuration."""


def sliced(runners: Mapping[int, Runner]) -> dict[str, Any]:
    """Accuracy and KL of both runs for each seed, and their differences over seeds."""
    by_seed = {str(seed): of_seed(runner) for seed, runner in runners.items()}
    differences = {
        words: over_seeds([each["difference"][words] for each in by_seed.values()]) for words in COMPARED.values()
    }
    return {"slices": SLICES, "steps": STEPS, "seeds": by_seed, "differences": differences}


def of_seed(runner: Runner) -> dict[str, Any]:
    """Both runs from one SFT model, tested on the same prompts."""
    start(runner)
    for stage in (REPLAY, SFT):
        runner.run(stage)
    found: dict[str, Any] = {}
    for name, changes in SLICED.items():
        runner.run(GRPO, changes, name=name)
        runner.run(TEST, [f"actor.model.path={runner.model_of(name)}"], f"test-{name}")
        tested = {
            words: fmean(value for _, value in rewards_of(runner.root, name, metric))
            for metric, words in COMPARED.items()
        }
        rows = [row for row in read_metrics(runner.root / name) if row["step"]]
        ages = {key: rows[-1].get(key, 0.0) for key in ("staleness_mean", "rollout_correction_cut")}
        found[name] = {**tested, "kl": of_training(runner.root / name)["kl_k3"], **ages}
    compared = difference(runner.root, IN_SLICES, WHOLE)
    return found | {"difference": {words: each["value"] for words, each in compared.items()}}


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean of the seeds' values and its 90% interval, by Student's t."""
    half = T_90[len(values)] * stdev(values) / len(values) ** 0.5 if len(values) in T_90 else None
    mean = fmean(values)
    low, high = (None, None) if half is None else (mean - half, mean + half)
    return {"value": mean, "low": low, "high": high, "seeds": list(values)}
