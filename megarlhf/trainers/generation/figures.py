"""Figures of an evaluation with their intervals, and their forms in tables and files.

Legend: P prompts, n samples of a prompt; N = P x n responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from megarlhf.algo.calibration import pair_report
from megarlhf.algo.intervals import Estimate, mean_of, pass_at_k_of, ratio_of, share_of, ties_of, wins_of
from megarlhf.observe.records.metrics import Metric
from megarlhf.observe.terminal.progress import table

REPORT = "eval.json"
"""File in the run directory."""
INTERVALS = (
    "95%, over prompts (texts, pairs): Wilson's of shares, Student's of other means, linearised of means over tokens"
)


@dataclass(frozen=True)
class Figure:
    """A number of an evaluation, with its interval where it has one."""

    value: Metric
    low: float | None = None
    high: float | None = None
    over: str = ""
    """Number and unit over which the mean is taken, such as `64 prompts`."""

    @classmethod
    def of(cls, estimate: Estimate, unit: str = "prompts") -> Figure:
        return cls(estimate.value, estimate.low, estimate.high, f"{estimate.prompts} {unit}")


Figures = dict[str, Figure]


def text_figures(logprobs_P: Tensor, tokens_P: Tensor, unit: str) -> Figures:
    """Loss and perplexity, over the tokens of all texts.

    Shapes: logprobs_P, tokens_P [P]: log-prob of each text in nats, and its number of tokens
    """
    loss = ratio_of(-logprobs_P, tokens_P)
    value, low, high = (None if x is None else math.exp(min(x, 700.0)) for x in (loss.value, loss.low, loss.high))
    return {
        "eval_loss": Figure.of(loss, unit),
        "eval_perplexity": Figure(value, low, high, f"{loss.prompts} {unit}"),
        "num_tokens": Figure(int(tokens_P.sum())),
    }


def pair_figures(scores_P2: Tensor, lengths_P2: Tensor) -> tuple[Figures, dict[str, Any]]:
    """Figures of a reward model, and `algo.calibration.pair_report`.

    Shapes: scores_P2, lengths_P2 [P, 2]: of the chosen and of the rejected response
    """
    report = pair_report(scores_P2, lengths_P2)
    chosen_P, rejected_P = scores_P2.double().unbind(1)
    low, high = report["accuracy_interval"]
    figures = {
        "eval_pair_accuracy": Figure(report["accuracy"], low, high, f"{report['pairs']} pairs"),
        "eval_loss": Figure.of(mean_of(-torch.nn.functional.logsigmoid(chosen_P - rejected_P)), "pairs"),
        "eval_calibration_error": Figure(report["calibration_error"], over=f"{report['pairs']} pairs"),
        "eval_chosen_score": Figure.of(mean_of(chosen_P), "pairs"),
        "eval_rejected_score": Figure.of(mean_of(rejected_P), "pairs"),
    }
    return figures, report


def mean_figure(values_N: Tensor, per_prompt: int) -> Figure:
    """Mean over the responses that have a value (not NaN); a share if all values are 0 or 1."""
    values_PN = values_N.double().cpu().view(-1, per_prompt)
    known_PN = ~values_PN.isnan()
    count_P = known_PN.sum(1)
    valued_P = count_P > 0
    if not bool(valued_P.any()):
        return Figure(None, over="0 prompts")
    values_PN, known_PN, count_P = values_PN[valued_P], known_PN[valued_P], count_P[valued_P]
    sums_P = values_PN.nan_to_num(0.0).sum(1)
    if bool((count_P != count_P[0]).any()):  # prompts have different numbers of values
        return Figure.of(ratio_of(sums_P, count_P))
    shares = bool(((values_PN == 0) | (values_PN == 1))[known_PN].all())
    return Figure.of((share_of if shares else mean_of)(sums_P / count_P))


def pass_figures(values_N: Tensor, per_prompt: int, pass_at: Sequence[int]) -> Figures:
    """average@n and pass@k of values that are 0 or 1; nothing if there are other values."""
    known_N = values_N[~values_N.isnan()]
    if not len(known_N) or bool(((known_N != 0) & (known_N != 1)).any()):
        return {}
    right_PN = values_N.double().cpu().view(-1, per_prompt)
    figures: Figures = {}
    if per_prompt > 1:
        figures[f"eval_average_at_{per_prompt}"] = Figure.of(share_of(right_PN.nanmean(1)))
    for k in pass_at:
        passed_P = pass_at_k_of(right_PN, k)
        none = bool(passed_P.isnan().all())
        figures[f"eval_pass_at_{k}"] = Figure(None, over="0 prompts") if none else Figure.of(share_of(passed_P))
    return figures


def comparison_figures(ours_N: Tensor, theirs_N: Tensor, per_prompt: int) -> Figures:
    """Win rate, tie rate and difference of two models' rewards for the same prompts. NaN marks a missing reward.

    Raises: ValueError where no prompt has rewards of both.
    """
    ours_PN, theirs_PN = (rewards_N.double().cpu().view(-1, per_prompt) for rewards_N in (ours_N, theirs_N))
    wins_P = wins_of(ours_PN, theirs_PN)
    if bool(wins_P.isnan().all()):
        raise ValueError("no prompt has a reward of both models: nothing can be compared; look at rewards")
    return {
        "eval_win_rate": Figure.of(share_of(wins_P)),
        "eval_tie_rate": Figure.of(share_of(ties_of(ours_PN, theirs_PN))),
        "eval_reward_difference": Figure.of(mean_of(ours_PN.nanmean(1) - theirs_PN.nanmean(1))),
        "num_prompts_not_compared": Figure(int(wins_P.isnan().sum())),
    }


def metrics_of(figures: Figures) -> dict[str, Metric]:
    """Values of the figures, for metrics.jsonl."""
    return {name: figure.value for name, figure in figures.items()}


def as_table(figures: Figures) -> Table:
    """Table of the figures, to be printed."""
    rows = [(name, figure.value, figure.low, figure.high, figure.over) for name, figure in figures.items()]
    return table("eval", rows, ("metric", "value", "95% from", "to", "over"))


def as_json(figures: Figures) -> dict[str, dict[str, Any]]:
    """Figures by name, for JSON; None where there is no interval."""
    return {name: {key: _finite(value) for key, value in vars(figure).items()} for name, figure in figures.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
