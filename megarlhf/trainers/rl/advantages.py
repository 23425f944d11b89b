"""Advantages of a step, by name: what each reads of the experience, which roles it needs, and what it writes.

A new one is an entry of `ADVANTAGES` and a name in `config/algo.py`; its mathematics is in `algo/`. The loop does not
know any of them.

Legend: N samples of the step, T response tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarlhf.algo.advantages import alone_in_group, group_centred, group_relative, leave_one_out
from megarlhf.algo.kl import kl_estimate
from megarlhf.config import AlgoConfig
from megarlhf.experience import Experience, Ragged
from megarlhf.kernels import packed_gae, packed_sums, packed_whiten
from megarlhf.trainers.experience.statistics import moments_of, num_tokens

Columns = Mapping[str, Tensor]

TOKEN_REWARDS = "token_reward_sums"
"""Per sample: the sum of the column `token_rewards`, where that may be spread over ranks."""


@dataclass(frozen=True)
class Advantage:
    """One entry of the table."""

    reads: tuple[str, ...]
    """Columns of the experience, per token or per sample, beside `rewards` and what the KL is made of."""
    roles: tuple[str, ...]
    """Roles that the run has to build for it, beside actor and reference."""
    writes: tuple[str, ...]
    compute: Callable[[AdvantageInputs, AlgoConfig], Columns]


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage: rewards of a step's tokens, and what they are made of."""

    experience: Experience
    algo: AlgoConfig
    kl_coef: float
    """Coefficient of the KL in the reward; 0: none."""

    @property
    def rewards_N(self) -> Tensor:
        """Each response's reward, without KL."""
        return self.experience.per_sample["rewards"]

    @property
    def groups_N(self) -> Tensor:
        return self.experience.groups_N.to(self.rewards_N.device)

    @property
    def token_rewards_T(self) -> Tensor | None:
        """Rewards of single tokens, where any reward gives them."""
        column = self.experience.columns.get("token_rewards")
        return None if column is None else column.values_T

    @property
    def totals_N(self) -> Tensor:
        """Each response's reward and those of its tokens."""
        return total_rewards(self.experience)

    def sums(self, x_T: Tensor) -> Tensor:
        """[T] -> [N], on every rank. Collective."""
        return self.experience.gather_per_sample(packed_sums(x_T, self.like.cu_seqlens))

    @property
    def like(self) -> Ragged:
        """A column of the response tokens that this rank has."""
        return self.experience.rollout_logprobs

    @property
    def old_T(self) -> Tensor:
        """The policy's log-probs, of which the KL is made."""
        return self.experience.columns["old_logprobs"].values_T

    def kl_T(self) -> Tensor:
        """The estimate of each token's KL to the reference."""
        ref_T, kl = self.experience.columns["ref_logprobs"].values_T, self.algo.kl
        return kl_estimate(self.old_T, ref_T, kl.estimator, kl.clamp)

    def kl_N(self) -> Tensor | None:
        """Its sum over each response; None where no KL is in the reward of a whole response."""
        return self.sums(self.kl_T()) if self.kl_coef > 0 and not self.kl_by_token else None

    @property
    def kl_by_token(self) -> bool:
        """Whether each token is charged the KL from itself on, with advantages that compare groups."""
        return self.kl_coef > 0 and self.algo.kl.credit == "token"

    def kl_to_go(self) -> Tensor:
        """[T]: coefficient x the KL from each token to the end of its response."""
        zeros_N, zeros_T = torch.zeros_like(self.rewards_N), torch.zeros_like(self.like.values_T)
        costs_T = self.kl_coef * self.kl_T()
        return packed_gae(
            self.like.values_T,
            None,
            zeros_T,
            zeros_N,
            self.like.cu_seqlens,
            gamma=1.0,
            lam=1.0,
            kl_coef=0.0,
            token_rewards_T=costs_T,
        )[0]

    def gae(self, scores_N: Tensor, values_T: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
        """Advantages and returns of the tokens, whose rewards are KL, `token_rewards_T`, and the score at the end."""
        like, token_rewards_T, kl, coef = self.like, self.token_rewards_T, self.algo.kl, self.kl_coef
        if coef > 0 and (token_rewards_T is not None or kl.clamp is not None):  # what the kernel does not make itself
            costs_T = -coef * self.kl_T()
            token_rewards_T = costs_T if token_rewards_T is None else token_rewards_T + costs_T
            coef = 0.0
        return packed_gae(
            self.old_T if coef > 0 else like.values_T,
            self.experience.columns["ref_logprobs"].values_T if coef > 0 else None,
            values_T,
            scores_N,
            like.cu_seqlens,
            gamma=gamma,
            lam=lam,
            kl_coef=coef,
            kl_kind=kl.estimator,
            token_rewards_T=token_rewards_T,
        )

    def returns_to_go(self, scores_N: Tensor, gamma: float) -> Tensor:
        """The discounted sum of the rewards from each token on: GAE of values 0 with lam 1."""
        return self.gae(scores_N, torch.zeros_like(self.like.values_T), gamma=gamma, lam=1.0)[0]

    def per_token(self, x_N: Tensor) -> Tensor:
        """[N] -> [T]."""
        return self.like.repeat_per_token(x_N).values_T

    def of_responses(self, advantages_N: Tensor) -> Tensor:
        """[N] -> [T]: a response's advantage at each of its tokens, less the KL from there on where that is asked."""
        advantages_T = self.per_token(advantages_N)
        return advantages_T - self.kl_to_go() if self.kl_by_token else advantages_T


def _gae(shaped: AdvantageInputs, algo: AlgoConfig) -> Columns:
    values_T = shaped.experience.columns["values"].values_T
    advantages_T, returns_T = shaped.gae(shaped.rewards_N, values_T, gamma=algo.gamma, lam=algo.lam)
    if algo.critic_lam is not None:
        returns_T = shaped.gae(shaped.rewards_N, values_T, gamma=algo.gamma, lam=algo.critic_lam)[1]
    return {"advantages": advantages_T, "returns": returns_T}


def _reinforce(shaped: AdvantageInputs, algo: AlgoConfig) -> Columns:
    return {"advantages": shaped.returns_to_go(shaped.rewards_N, algo.gamma)}


def _reinforce_baseline(shaped: AdvantageInputs, algo: AlgoConfig) -> Columns:
    """Rewards of single tokens stay where they are; the group's mean is of the whole responses. One that is alone in
    its group gets no reward at all where it is to get nothing, and pays its KL."""
    totals_N = shaped.totals_N
    centred_N = group_centred(totals_N, shaped.groups_N, group_of_one=algo.group_of_one)
    advantages_T = shaped.returns_to_go(shaped.rewards_N + (centred_N - totals_N), 1.0)
    if algo.group_of_one == "zero" and shaped.token_rewards_T is not None:
        cost_T = -shaped.kl_to_go() if shaped.kl_coef > 0 else torch.zeros_like(advantages_T)
        alone_T = shaped.per_token(alone_in_group(shaped.groups_N))
        advantages_T = torch.where(alone_T, cost_T, advantages_T)
    return {"advantages": advantages_T}


def _remax(shaped: AdvantageInputs, algo: AlgoConfig) -> Columns:
    baselines_N = shaped.experience.per_sample["greedy_rewards"]
    return {"advantages": shaped.returns_to_go(shaped.rewards_N, 1.0) - shaped.per_token(baselines_N)}


def _leave_one_out(shaped: AdvantageInputs, algo: AlgoConfig) -> Columns:
    rewards_N, kl_N = shaped.totals_N, shaped.kl_N()
    if kl_N is not None:
        rewards_N = rewards_N - shaped.kl_coef * kl_N
    advantages_N = leave_one_out(rewards_N, shaped.groups_N, group_of_one=algo.group_of_one)
    return {"advantages": shaped.of_responses(advantages_N)}


def _group_relative(shaped: AdvantageInputs, algo: AlgoConfig) -> Columns:
    """The KL is subtracted after the rewards were scaled. Divided by the deviation with them its coefficient would
    cancel where the rewards of a group are equal: the KL alone would then make advantages of size 1."""
    single = algo.group_of_one
    if algo.scale_by_group_std:
        advantages_N = group_relative(
            shaped.totals_N,
            shaped.groups_N,
            unbiased=algo.group_std == "unbiased",
            of_all=algo.group_std_over == "step",
            counted_N=shaped.experience.per_sample.get("rewarded"),
            eps=algo.group_std_eps,
            floor=algo.group_std_floor,
            group_of_one=single,
        )
    else:
        advantages_N = group_centred(shaped.totals_N, shaped.groups_N, group_of_one=single)
    if (kl_N := shaped.kl_N()) is not None:
        advantages_N = advantages_N - shaped.kl_coef * group_centred(kl_N, shaped.groups_N, group_of_one=single)
    return {"advantages": shaped.of_responses(advantages_N)}


_WHITENING_EPS = 1e-8
"""Added to the variance; verl, TRL and OpenRLHF have the same."""

_ONLY = ("advantages",)

ADVANTAGES: Mapping[str, Advantage] = {
    "gae": Advantage(("values",), ("critic",), ("advantages", "returns"), _gae),
    "reinforce": Advantage((), (), _ONLY, _reinforce),
    "reinforce_plus_plus": Advantage((), (), _ONLY, _reinforce),
    "reinforce_plus_plus_baseline": Advantage((), (), _ONLY, _reinforce_baseline),
    "remax": Advantage(("greedy_rewards",), (), _ONLY, _remax),
    "leave_one_out": Advantage((), (), _ONLY, _leave_one_out),
    "group_relative": Advantage((), (), _ONLY, _group_relative),
}


def add_advantages(experience: Experience, algo: AlgoConfig, kl_coef: float | None = None) -> Experience:
    """Advantages (and, with a critic, returns) for every response token of the samples that this rank has. Collective.

    `kl_coef`: in force in this step; None: the configured one.
    """
    if algo.advantage not in ADVANTAGES:
        raise ValueError(f"algo.advantage = {algo.advantage!r} is not computed; the known ones are {tuple(ADVANTAGES)}")
    coef = algo.kl.coef if kl_coef is None else kl_coef
    shaped = AdvantageInputs(experience, algo, coef if algo.kl.placement == "reward" else 0.0)
    entry = ADVANTAGES[algo.advantage]
    columns = dict(entry.compute(shaped, algo))
    assert set(columns) == set(entry.writes), f"{algo.advantage} has written {sorted(columns)}"
    if algo.whitens and algo.whiten_over == "step":
        counted_N = experience.per_sample.get("trained")
        columns["advantages"] = whitened(experience, columns["advantages"], counted_N, algo)
    lengths_N = shaped.like.lengths_N
    return experience.with_columns({name: Ragged(x_T, lengths_N) for name, x_T in columns.items()})


def total_rewards(experience: Experience) -> Tensor:
    """[N]: each response's reward, with those of its tokens."""
    rewards_N, column = experience.per_sample["rewards"], experience.columns.get("token_rewards")
    of_tokens_N = experience.per_sample.get(TOKEN_REWARDS)
    if of_tokens_N is None and column is not None:
        assert experience.holding is None, f"no {TOKEN_REWARDS} beside a column that is not whole"
        of_tokens_N = packed_sums(column.values_T, column.cu_seqlens)
    return rewards_N if of_tokens_N is None else rewards_N + of_tokens_N


def whitened(experience: Experience, advantages_T: Tensor, counted_N: Tensor | None, algo: AlgoConfig) -> Tensor:
    """(A - mean) / deviation over the tokens of the samples that `counted_N` [N] bool marks (None: all), those of other
    ranks included; zero elsewhere. Collective."""
    moments = moments_of(experience, advantages_T, counted_N)
    mask_T = None
    if counted_N is not None:
        mask_T = experience.rollout_logprobs.repeat_per_token(counted_N.to(advantages_T.device)).values_T
    if algo.whiten_variance == "biased":
        return packed_whiten(advantages_T, mask_T, eps=_WHITENING_EPS, moments=moments)
    count = num_tokens(experience, counted_N)
    shrink = max(count - 1, 1) / max(count, 1)  # biased over unbiased variance
    return packed_whiten(advantages_T, mask_T, eps=_WHITENING_EPS * shrink, moments=moments) * shrink**0.5


def whiten_per_mini_batch(experience: Experience, samples: Sequence[int], algo: AlgoConfig) -> Experience:
    """With the advantages of a mini-batch whitened by themselves, where `algo` says so; else as it is. Collective."""
    if not (algo.whitens and algo.whiten_over == "mini_batch"):
        return experience
    chosen_N = torch.zeros(experience.num_samples, dtype=torch.bool)
    chosen_N[list(samples)] = True
    trained_N = experience.per_sample.get("trained")
    if trained_N is not None:
        chosen_N &= trained_N.cpu()
    column = experience.columns["advantages"]
    white_T = whitened(experience, column.values_T, chosen_N, algo)
    return experience.with_columns({"advantages": Ragged(white_T, column.lengths_N)})
