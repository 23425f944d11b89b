"""What a step's samples were like, as metrics."""

from __future__ import annotations

from collections.abc import Mapping

from megarlhf.algo.advantages import explained_variance, without_signal
from megarlhf.algo.kl import KLKind, kl_estimate
from megarlhf.config import KLConfig, RLConfig
from megarlhf.experience import Experience
from megarlhf.trainers.rl_advantages import total_rewards, trained_mask

LOGGED_KL: Mapping[str, KLKind] = {"kl_k1": "k1", "kl_k3": "k3"}
"""k1 is unbiased and noisy, k3 never negative: the two together say when either is not to be trusted."""


def kl_metrics(experience: Experience, kl: KLConfig) -> dict[str, float | None]:
    """The KL to the reference, mean per response token; null where there is no reference."""
    ref = experience.columns.get("ref_logprobs")
    if ref is None:
        return dict.fromkeys(("kl", *LOGGED_KL))
    old_T = experience.columns["old_logprobs"].values_T
    return {
        "kl": float(kl_estimate(old_T, ref.values_T, kl.estimator, kl.clamp).mean()),
        **{name: float(kl_estimate(old_T, ref.values_T, kind).mean()) for name, kind in LOGGED_KL.items()},
    }


def describe(experience: Experience, cfg: RLConfig) -> dict[str, float | None]:
    """What the step's samples were like. Rewards, and what follows from them, are of the samples that have one."""
    lengths_N, rewards_N = experience.response_lengths_N, total_rewards(experience)
    groups_N, trained_T = experience.groups_N.to(rewards_N.device), trained_mask(experience)
    if (rewarded_N := experience.per_sample.get("rewarded")) is not None:
        rewards_N, groups_N = rewards_N[rewarded_N], groups_N[rewarded_N]
    metrics: dict[str, float | None] = {
        "reward_mean": float(rewards_N.mean()),
        "reward_std": float(rewards_N.std(correction=0)),
        **kl_metrics(experience, cfg.algo.kl),
        "response_length_mean": float(lengths_N.float().mean()),
        "finished_fraction": float(experience.rollouts.finished_N.float().mean()),
        "tokens": int(lengths_N.sum()),
    }
    if (trained_N := experience.per_sample.get("trained")) is not None:
        metrics["samples_left_out"] = int((~trained_N).sum())
    if cfg.rollout.num_samples_per_prompt > 1:
        silent_N = without_signal(rewards_N, groups_N)
        metrics["groups_without_signal"] = float(silent_N.float().mean())
    if "returns" in experience.columns:
        values_T, returns_T = (experience.columns[name].values_T for name in ("values", "returns"))
        if trained_T is not None:
            values_T, returns_T = values_T[trained_T], returns_T[trained_T]
        metrics["value_mean"] = float(values_T.mean())
        metrics["explained_variance"] = explained_variance(values_T, returns_T)
    return metrics
