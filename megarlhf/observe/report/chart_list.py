"""The charts of a report, and the figures of its summary: lists, by what was run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["sft", "rm", "dpo", "rl"]

KIND_TITLES: dict[Kind, str] = {
    "sft": "Supervised fine-tuning",
    "rm": "Reward model",
    "dpo": "Preference optimisation",
    "rl": "Reinforcement learning",
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: what it is called, what it shows, and a sentence on how to read it."""

    title: str
    metrics: tuple[str, ...]
    right: tuple[str, ...] = ()
    """Metrics of the second axis, on the right."""
    axis: str = ""
    right_axis: str = ""
    hint: str = ""
    wide: bool = False
    stacked: bool = False
    log_if_positive: bool = False
    mark_best: str | None = None
    """A metric whose highest point is marked, if the run went on after it."""


_SPEED = Chart(title="Tokens per second", metrics=("tokens_per_second",), axis="trained tokens, all ranks")
_MEMORY = Chart(title="Peak memory", metrics=("peak_memory_gib",), axis="GiB", hint="Of the rank that needs most.")

REWARD = Chart(
    title="Reward and held-out accuracy",
    metrics=("reward_mean", "eval_reward_mean"),
    right=("eval_accuracy",),
    axis="learned reward",
    right_axis="held-out true accuracy",
    hint="A reward that still rises while held-out accuracy falls is over-optimisation of the reward model.",
    wide=True,
    mark_best="eval_accuracy",
)

_BALANCE = "Evenly spread tokens have as many as a token has experts."

_LEARNING_RATE = Chart(title="Learning rate", metrics=("learning_rate",))
_LOAD = Chart(title="Load balance of experts", metrics=("router_aux_loss",), hint=_BALANCE)

CHARTS: dict[Kind, tuple[Chart, ...]] = {
    "sft": (
        Chart(title="Loss", metrics=("loss", "eval_loss"), axis="nats per token"),
        Chart(title="Held-out perplexity", metrics=("eval_perplexity",)),
        Chart(title="Gradient norm", metrics=("grad_norm",)),
        _LEARNING_RATE,
        _LOAD,
        _SPEED,
        _MEMORY,
    ),
    "rm": (
        Chart(title="Pair accuracy", metrics=("pair_accuracy", "eval_pair_accuracy"), hint="0.5 is chance."),
        Chart(title="Loss", metrics=("loss", "eval_loss"), hint="ln 2 = 0.693 is chance."),
        Chart(title="Held-out scores", metrics=("eval_chosen_score", "eval_rejected_score")),
        Chart(title="Gradient norm", metrics=("grad_norm",)),
        _LEARNING_RATE,
        _LOAD,
        _SPEED,
        _MEMORY,
    ),
    "dpo": (
        Chart(title="Pair accuracy", metrics=("pair_accuracy", "eval_pair_accuracy"), hint="0.5 is chance."),
        Chart(title="Loss", metrics=("loss", "eval_loss")),
        Chart(
            title="Implicit rewards",
            metrics=("chosen_reward", "rejected_reward", "reward_margin", "eval_reward_margin"),
        ),
        Chart(
            title="Log-probs of responses",
            metrics=("chosen_logprob", "rejected_logprob", "eval_chosen_logprob", "eval_rejected_logprob"),
            axis="nats",
            hint="Both may fall while the margin grows: sft_coef holds the chosen ones.",
        ),
        Chart(title="Gradient norm", metrics=("grad_norm",)),
        _LEARNING_RATE,
        _LOAD,
        _SPEED,
        _MEMORY,
    ),
    "rl": (
        REWARD,
        Chart(
            title="KL to the reference",
            metrics=("kl", "kl_k1", "kl_k3"),
            axis="nats per response token",
            hint="k1 is noisy and unbiased, k3 never negative: apart they are not to be trusted.",
        ),
        Chart(
            title="KL of a step, old to new policy",
            metrics=("policy_kl",),
            axis="nats per response token",
            hint="How far the updates of one step have moved the policy.",
        ),
        Chart(
            title="Spread of the reward",
            metrics=("reward_std",),
            right=("groups_without_signal",),
            axis="standard deviation",
            right_axis="share of samples",
            hint="In a group of equal rewards nothing is learnt.",
        ),
        Chart(title="Response length", metrics=("response_length_mean",), axis="tokens"),
        Chart(title="Entropy", metrics=("entropy",), axis="nats per token"),
        Chart(title="Clip fraction", metrics=("clip_fraction",)),
        Chart(
            title="Log-prob gap, trainer against rollout engine",
            metrics=("rollout_logprob_gap_mean", "rollout_logprob_gap_p999", "rollout_logprob_gap_max"),
            axis="nats",
            hint="Jumps when the engine's weights are not the actor's.",
            log_if_positive=True,
        ),
        Chart(title="Losses", metrics=("policy_loss", "value_loss")),
        Chart(
            title="Explained variance of the critic",
            metrics=("explained_variance",),
            hint="1: values predict the returns; 0: no better than their mean.",
        ),
        Chart(title="Gradient norms", metrics=("actor_grad_norm", "critic_grad_norm")),
        Chart(
            title="Load balance of experts", metrics=("actor_router_aux_loss", "critic_router_aux_loss"), hint=_BALANCE
        ),
        Chart(title="Learning rates", metrics=("actor_learning_rate", "critic_learning_rate")),
        Chart(
            title="Tokens per second",
            metrics=("tokens_per_second", "rollout_tokens_per_second"),
            axis="trained, sampled; all ranks",
        ),
        _MEMORY,
        Chart(
            title="Seconds by phase",
            metrics=("seconds_rollout", "seconds_experience", "seconds_train", "seconds_reshard"),
            axis="seconds per step",
            wide=True,
            stacked=True,
        ),
    ),
}

SUMMARY: dict[Kind, dict[str, Literal["highest", "lowest", "worst", "neither"]]] = {
    "sft": {"loss": "lowest", "eval_loss": "lowest", "eval_perplexity": "lowest"},
    "rm": {"loss": "lowest", "pair_accuracy": "highest", "eval_pair_accuracy": "highest"},
    "dpo": {"loss": "lowest", "pair_accuracy": "highest", "eval_pair_accuracy": "highest", "reward_margin": "neither"},
    "rl": {
        "reward_mean": "highest",
        "eval_reward_mean": "highest",
        "eval_accuracy": "highest",
        "kl": "neither",
        "response_length_mean": "neither",
        "entropy": "neither",
        "rollout_logprob_gap_max": "worst",
    },
}
"""The metrics of the summary, and which value of each it names as the best: the highest, the lowest or none. Of
"worst" it names the highest as the worst: a single jump is what matters."""
