"""Charts of a report and figures of its summary. Each is shown for runs that have logged one of its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["sft", "rm", "dpo", "rl", "generate", "eval"]

KIND_TITLES: dict[Kind, str] = {
    "sft": "Supervised fine-tuning",
    "rm": "Reward model",
    "dpo": "Preference optimisation",
    "rl": "Reinforcement learning",
    "generate": "Generation",
    "eval": "Evaluation",
}


@dataclass(frozen=True)
class Chart:
    """A chart's title, its metrics, the label of their axis, and a sentence (`hint`) on how to read it."""

    title: str
    metrics: tuple[str, ...]
    hint: str = ""
    axis: str = ""
    kinds: tuple[Kind, ...] = ()
    """Commands whose runs have this chart; () for all."""
    right: tuple[str, ...] = ()
    """Metrics of the second axis, on the right."""
    right_axis: str = ""
    wide: bool = False
    stacked: bool = False
    log_if_positive: bool = False
    mark_best: str | None = None
    """Metric whose highest point is marked, unless the run ended there."""


_NATS = "nats per response token"
REWARD = Chart(
    "Reward and held-out accuracy",
    ("reward_mean", "eval_reward_mean"),
    "With a reward model: a reward that still rises while held-out accuracy falls is over-optimisation.",
    axis="reward",
    right=("eval_accuracy",),
    right_axis="share of right answers",
    wide=True,
    mark_best="eval_accuracy",
)
CHARTS = (
    REWARD,
    Chart("Pair accuracy", ("pair_accuracy", "eval_pair_accuracy"), "0.5 is chance.", axis="share of pairs"),
    Chart("Loss", ("loss", "eval_loss"), axis=_NATS, kinds=("sft",)),
    Chart("Loss", ("loss", "eval_loss"), "ln 2 = 0.693 is chance.", axis="nats per pair", kinds=("rm",)),
    Chart("Loss", ("loss", "eval_loss"), "dpo: ln 2 = 0.693 is chance.", axis="loss per pair", kinds=("dpo",)),
    Chart("Losses", ("loss", "policy_loss", "value_loss"), axis="loss", kinds=("rl",)),
    Chart("Held-out perplexity", ("eval_perplexity",), axis="perplexity"),
    Chart("Held-out scores", ("eval_chosen_score", "eval_rejected_score"), axis="score"),
    Chart(
        "Implicit rewards",
        ("chosen_reward", "rejected_reward", "reward_margin", "eval_reward_margin"),
        axis="beta x log-ratio, nats",
    ),
    Chart(
        "Log-probs of responses",
        ("chosen_logprob", "rejected_logprob", "eval_chosen_logprob", "eval_rejected_logprob"),
        "Both may fall while the margin grows: sft_coef holds the chosen ones.",
        axis="nats",
    ),
    Chart(
        "KL to the reference",
        ("kl", "kl_k1", "kl_k3"),
        "k1 is noisy and unbiased, k3 is never negative. Where they differ much, trust neither.",
        axis=_NATS,
    ),
    Chart(
        "KL of a step, old to new policy",
        ("policy_kl",),
        "How far the updates of one step have moved the policy.",
        axis=_NATS,
    ),
    Chart(
        "Spread of the reward",
        ("reward_std",),
        "A group of equal rewards teaches nothing.",
        axis="standard deviation",
        right=("groups_without_signal",),
        right_axis="share of samples",
    ),
    Chart("Response length", ("response_length_mean",), axis="tokens"),
    Chart("Entropy", ("entropy",), axis="nats per token"),
    Chart("Clip fraction", ("clip_fraction",), axis="share of tokens"),
    Chart(
        "Log-prob gap, trainer against rollout engine",
        ("rollout_logprob_gap_mean", "rollout_logprob_gap_p999", "rollout_logprob_gap_max"),
        "It jumps when the engine's weights are not the actor's.",
        axis="nats",
        log_if_positive=True,
    ),
    Chart(
        "Age of the samples, with slices",
        ("staleness_mean", "staleness_max"),
        "Steps between the drawing of a token and the training on it.",
        axis="steps",
        right=("rollout_correction_cut",),
        right_axis="share of tokens cut by the correction",
    ),
    Chart(
        "Ends of conversations with an environment",
        tuple(
            f"ended_by/{reason}" for reason in ("environment", "model", "turn_cut", "no_room", "max_turns", "failure")
        ),
        "The first two are no limits; conversations that ended for another reason are truncated.",
        axis="share of samples",
        right=("turns_mean",),
        right_axis="turns",
    ),
    Chart(
        "Explained variance of the critic",
        ("explained_variance",),
        "1: values predict the returns; 0: no better than their mean.",
        axis="share of the variance",
    ),
    Chart("Gradient norm", ("grad_norm", "actor_grad_norm", "critic_grad_norm"), "Before clipping.", axis="norm"),
    Chart(
        "Load balance of experts",
        ("router_aux_loss", "actor_router_aux_loss", "critic_router_aux_loss"),
        "Evenly spread tokens have as many as a token has experts.",
        axis="auxiliary loss",
    ),
    Chart("Learning rate", ("learning_rate", "actor_learning_rate", "critic_learning_rate"), axis="learning rate"),
    Chart(
        "Tokens per second",
        ("tokens_per_second", "rollout_tokens_per_second"),
        "Trained and sampled, of all ranks.",
        axis="tokens per second",
    ),
    Chart("Peak memory", ("peak_memory_gib",), "Of the rank that needs most.", axis="GiB"),
    Chart(
        "Seconds by phase",
        ("seconds_rollout", "seconds_experience", "seconds_train", "seconds_reshard"),
        axis="seconds per step",
        wide=True,
        stacked=True,
    ),
)

_UNITS = {"seconds": "seconds", "gib": "GiB", "mib": "MiB", "fraction": "share", "tokens": "tokens"}
"""Units by the first or last word of a metric's name."""


def axis_of(metric: str, kind: Kind) -> str:
    """Label of the axis for a metric of a run of this kind: as its chart has it, or its unit, or its name."""
    for chart in CHARTS:
        if metric in chart.metrics + chart.right and kind in (chart.kinds or (kind,)):
            return chart.right_axis if metric in chart.right else chart.axis
    words = metric.split("_")
    return _UNITS.get(words[-1]) or _UNITS.get(words[0]) or metric


SUMMARY: dict[str, Literal["highest", "lowest", "worst", "neither"]] = {
    "loss": "lowest",
    "eval_loss": "lowest",
    "eval_perplexity": "lowest",
    "pair_accuracy": "highest",
    "eval_pair_accuracy": "highest",
    "reward_margin": "neither",
    "reward_mean": "highest",
    "eval_reward_mean": "highest",
    "eval_accuracy": "highest",
    "kl": "neither",
    "response_length_mean": "neither",
    "entropy": "neither",
    "rollout_logprob_gap_max": "worst",
}
"""Metrics of the summary, and the value that it names as the best: the highest, the lowest or none. "worst": the
highest is named as the worst, because a single jump matters."""
