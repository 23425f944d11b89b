"""Metrics that describe the samples of a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megarlhf.algo.advantages import explained_variance, without_signal
from megarlhf.algo.kl import KLKind, kl_estimate
from megarlhf.config import KLConfig, RLConfig
from megarlhf.experience import Experience
from megarlhf.own_code.policy_terms import estimator_of
from megarlhf.rollouts import REASONS, Rollouts
from megarlhf.trainers.experience.statistics import means_of, moments_of, sums_of, variance_of
from megarlhf.trainers.rl.advantages import total_rewards

LOGGED_KL: Mapping[str, KLKind] = {"kl_k1": "k1", "kl_k3": "k3"}
"""Estimators that are always logged. k1 is unbiased and noisy, k3 is never negative; a large difference between them
shows that neither is reliable."""


def kl_metrics(experience: Experience, kl: KLConfig, *, corrected: bool = False) -> dict[str, float | None]:
    """KL to the reference, mean per response token; None without a reference. Collective.

    corrected: the mean weighted by the rollout correction, since older weights drew samples
    """
    ref = experience.columns.get("ref_logprobs")
    if ref is None:
        return dict.fromkeys(("kl", *LOGGED_KL))
    old_T = experience.columns["old_logprobs"].values_T
    estimates = [kl_estimate(old_T, ref.values_T, estimator_of(kl.estimator), kl.clamp)]
    estimates += [kl_estimate(old_T, ref.values_T, kind) for kind in LOGGED_KL.values()]
    means = means_of(experience, *estimates)
    if corrected:
        weights_T = experience.columns["rollout_weights"].values_T
        weight, *weighted = means_of(experience, weights_T, *(weights_T * estimate_T for estimate_T in estimates))
        means = [mean / weight for mean in weighted] if weight else means
    return dict(zip(("kl", *LOGGED_KL), means, strict=True))


def describe(experience: Experience, cfg: RLConfig) -> dict[str, float | None]:
    """Metrics of the samples of a step. Those of rewards are over the samples that have a reward. Collective."""
    lengths_N, rewards_N = experience.response_lengths_N, total_rewards(experience)
    groups_N, trained_N = experience.groups_N.to(rewards_N.device), experience.per_sample.get("trained")
    if (rewarded_N := experience.per_sample.get("rewarded")) is not None:
        rewards_N, groups_N = rewards_N[rewarded_N], groups_N[rewarded_N]
    metrics: dict[str, float | None] = {
        "reward_mean": float(rewards_N.mean()),
        "reward_std": float(rewards_N.std(correction=0)),
        **kl_metrics(experience, cfg.algo.kl, corrected=cfg.rollout.is_stale),
        "response_length_mean": float(lengths_N.float().mean()),
        "finished_fraction": float(experience.rollouts.finished_N.float().mean()),
        "tokens": int(lengths_N.sum()),
    }
    metrics |= conversation_metrics(experience.rollouts)
    if trained_N is not None:
        metrics["samples_left_out"] = int((~trained_N).sum())
    if cfg.rollout.num_samples_per_prompt > 1:
        metrics["groups_without_signal"] = share_without_signal(rewards_N, groups_N)
    if "returns" in experience.columns:
        values_T, returns_T = (experience.columns[name].values_T for name in ("values", "returns"))
        errors_T = returns_T.double() - values_T.double()
        metrics["value_mean"] = means_of(experience, values_T, counted_N=trained_N)[0]
        moments = [moments_of(experience, x_T, trained_N) for x_T in (returns_T, errors_T)]
        metrics["explained_variance"] = explained_variance(*map(variance_of, moments))
    if experience.holding is not None:
        metrics["columns_received_mib"] = int(experience.holding.traffic.received_W.max()) / 2**20
    return metrics


def conversation_metrics(rollouts: Rollouts) -> dict[str, float | None]:
    """Metrics of conversations with an environment; none where there is no environment."""
    if rollouts.stretches is None or not rollouts.dialogues:
        return {}
    dialogues, count = rollouts.dialogues, len(rollouts.dialogues)
    turns_N = (rollouts.stretches.lengths.lengths_N + 1) // 2
    added = sum(talk.added for talk in dialogues)
    return {
        "turns_mean": float(turns_N.double().mean()),
        "observed_tokens_mean": (rollouts.stretches.observed.num_tokens + added) / count,
        **{f"ended_by/{reason}": sum(talk.ended_by == reason for talk in dialogues) / count for reason in REASONS},
        "turns_rewritten": sum(talk.rewritten for talk in dialogues),
        "turns_with_other_white_space": sum(talk.white_space for talk in dialogues),
        "conversations_redrawn": sum(talk.redraws for talk in dialogues),
    }


def conversation_lengths(rollouts: Rollouts) -> dict[str, list[int]]:
    """Observed tokens and turns of each conversation with an environment; nothing where there is no environment.

    Tokens that `reset` has added are a part of the prompt.
    """
    if rollouts.stretches is None:
        return {}
    turns_N = (rollouts.stretches.lengths.lengths_N + 1) // 2
    return {"observed": rollouts.stretches.observed.lengths_N.tolist(), "turns": turns_N.tolist()}


def share_without_signal(rewards_N: Tensor, groups_N: Tensor) -> float:
    """Share of samples in whose group all rewards are equal."""
    return float(without_signal(rewards_N, groups_N).float().mean())


def kl_by_sample(experience: Experience, kl: KLConfig) -> Tensor:
    """KL to the reference, the mean over each response's tokens, [N]; NaN without a reference. Collective."""
    ref = experience.columns.get("ref_logprobs")
    if ref is None:
        return torch.full([experience.num_samples], torch.nan)
    kl_T = kl_estimate(experience.columns["old_logprobs"].values_T, ref.values_T, estimator_of(kl.estimator), kl.clamp)
    return sums_of(experience, kl_T)[:, 0].cpu() / experience.response_lengths_N
