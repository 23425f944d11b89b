"""Advantages by name or import path: the columns that each reads and writes.

A new built-in advantage is an entry of `ADVANTAGES` and of `config/algo.py::TRAITS`. Its mathematics is in `algo/`. The
loop does not know their names. An advantage of the user's own gets a copy of the whole step on every rank.

Legend: N samples of the step, T response tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from megarlhf.algo.advantages import alone_in_group, group_centred, group_relative, leave_one_out
from megarlhf.algo.kl import KLKind, kl_estimate
from megarlhf.columns import Ragged
from megarlhf.config import AlgoConfig
from megarlhf.config.algo import TRAITS
from megarlhf.experience import Experience
from megarlhf.kernels import packed_gae, packed_sums, packed_whiten
from megarlhf.own_code.advantage import Advantage, load_advantage
from megarlhf.own_code.load import is_path
from megarlhf.own_code.policy_terms import estimator_of
from megarlhf.trainers.experience.own_advantage import own_columns, whole_step
from megarlhf.trainers.experience.statistics import moments_of, num_tokens

Columns = Mapping[str, Tensor]

TOKEN_REWARDS = "token_reward_sums"
"""Per-sample column: sum of `token_rewards`, which may be spread over ranks."""


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage: the rewards of a step, its KL, and sums over responses.

    An advantage of the user's own gets the whole step on every rank; a built-in one the tokens of this rank.
    """

    experience: Experience
    algo: AlgoConfig
    kl_coef: float
    """Coefficient of the KL in the reward; 0 without it."""

    @property
    def rewards_N(self) -> Tensor:
        """Reward of each response, without KL."""
        return self.experience.per_sample["rewards"]

    def __getitem__(self, column: str) -> Tensor:
        """A column that the advantage has declared to read: [T], or [N] for `greedy_rewards`."""
        if column in self.experience.per_sample:
            return self.experience.per_sample[column]
        if column not in self.experience.columns:
            raise ValueError(
                f"the column {column!r} is not there; declare it: @megarlhf.advantage(reads=({column!r},))"
            )
        return self.experience.columns[column].values_T

    @property
    def lengths_N(self) -> Tensor:
        """Sampled tokens of each response, int64 on the CPU."""
        return self.experience.response_lengths_N

    @property
    def finished_N(self) -> Tensor:
        """Whether each response ended with an end token, and was not cut."""
        return self.experience.rollouts.finished_N

    @property
    def groups_N(self) -> Tensor:
        """Number of each response's group; the responses to one prompt have the same."""
        return self.experience.groups_N.to(self.rewards_N.device)

    @property
    def token_rewards_T(self) -> Tensor | None:
        """Rewards of single tokens, where any reward gives them."""
        column = self.experience.columns.get("token_rewards")
        return None if column is None else column.values_T

    @property
    def totals_N(self) -> Tensor:
        """Reward of each response, including the rewards of its tokens."""
        return total_rewards(self.experience)

    def sums(self, x_T: Tensor) -> Tensor:
        """Sums over responses, [T] -> [N], on every rank. Collective."""
        return self.experience.gather_per_sample(packed_sums(x_T, self.like.cu_seqlens))

    @property
    def like(self) -> Ragged:
        """Any column of the response tokens on this rank, for its lengths and device."""
        return self.experience.rollout_logprobs

    @property
    def old_T(self) -> Tensor:
        """The policy's log-probs, from which the KL is computed."""
        return self.experience.columns["old_logprobs"].values_T

    def kl_T(self) -> Tensor:
        """Estimated KL of each token to the reference."""
        ref_T, kl = self.experience.columns["ref_logprobs"].values_T, self.algo.kl
        return kl_estimate(self.old_T, ref_T, estimator_of(kl.estimator), kl.clamp)

    def kl_N(self) -> Tensor | None:
        """Estimated KL of each response; None where the reward of a whole response has no KL."""
        return self.sums(self.kl_T()) if self.kl_coef > 0 and not self.kl_by_token else None

    @property
    def kl_by_token(self) -> bool:
        """Whether an advantage that compares groups charges each token the KL from that token on."""
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
        """Advantages and returns of tokens whose rewards are the KL, `token_rewards_T`, and the score at the end."""
        like, token_rewards_T, kl, coef = self.like, self.token_rewards_T, self.algo.kl, self.kl_coef
        in_kernel = token_rewards_T is None and kl.clamp is None and not is_path(kl.estimator)
        if coef > 0 and not in_kernel:
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
            kl_kind=cast(KLKind, "k1" if is_path(kl.estimator) else kl.estimator),
            token_rewards_T=token_rewards_T,
        )

    def returns_to_go(self, scores_N: Tensor, gamma: float) -> Tensor:
        """Discounted sum of the rewards from each token on, which is GAE with values 0 and lam 1."""
        return self.gae(scores_N, torch.zeros_like(self.like.values_T), gamma=gamma, lam=1.0)[0]

    def per_token(self, x_N: Tensor) -> Tensor:
        """Repeat a response's number at each of its tokens, [N] -> [T]."""
        return self.like.repeat_per_token(x_N).values_T

    def token_advantages(self, advantages_N: Tensor) -> Tensor:
        """Advantage of a response at each of its tokens, less the KL from there on where `kl_by_token`: [N] -> [T]."""
        advantages_T = self.per_token(advantages_N)
        return advantages_T - self.kl_to_go() if self.kl_by_token else advantages_T


def _gae(inputs: AdvantageInputs) -> Columns:
    algo = inputs.algo
    values_T = inputs.experience.columns["values"].values_T
    advantages_T, returns_T = inputs.gae(inputs.rewards_N, values_T, gamma=algo.gamma, lam=algo.lam)
    if algo.critic_lam is not None:
        returns_T = inputs.gae(inputs.rewards_N, values_T, gamma=algo.gamma, lam=algo.critic_lam)[1]
    return {"advantages": advantages_T, "returns": returns_T}


def _reinforce(inputs: AdvantageInputs) -> Columns:
    return {"advantages": inputs.returns_to_go(inputs.rewards_N, inputs.algo.gamma)}


def _reinforce_baseline(inputs: AdvantageInputs) -> Columns:
    """The group's mean is of whole responses; rewards of single tokens stay at their tokens. With `group_of_one = zero`
    a response that is alone in its group gets no reward, and pays its KL."""
    algo = inputs.algo
    totals_N = inputs.totals_N
    centred_N = group_centred(totals_N, inputs.groups_N, group_of_one=algo.group_of_one)
    advantages_T = inputs.returns_to_go(inputs.rewards_N + (centred_N - totals_N), 1.0)
    if algo.group_of_one == "zero" and inputs.token_rewards_T is not None:
        cost_T = -inputs.kl_to_go() if inputs.kl_coef > 0 else torch.zeros_like(advantages_T)
        alone_T = inputs.per_token(alone_in_group(inputs.groups_N))
        advantages_T = torch.where(alone_T, cost_T, advantages_T)
    return {"advantages": advantages_T}


def _remax(inputs: AdvantageInputs) -> Columns:
    baselines_N = inputs.experience.per_sample["greedy_rewards"]
    return {"advantages": inputs.returns_to_go(inputs.rewards_N, 1.0) - inputs.per_token(baselines_N)}


def _leave_one_out(inputs: AdvantageInputs) -> Columns:
    algo = inputs.algo
    rewards_N, kl_N = inputs.totals_N, inputs.kl_N()
    if kl_N is not None:
        rewards_N = rewards_N - inputs.kl_coef * kl_N
    advantages_N = leave_one_out(rewards_N, inputs.groups_N, group_of_one=algo.group_of_one)
    return {"advantages": inputs.token_advantages(advantages_N)}


def _group_relative(inputs: AdvantageInputs) -> Columns:
    """The KL is subtracted after the rewards are scaled. If it were scaled with them, its coefficient would cancel
    where the rewards of a group are equal: the KL alone would give advantages of size 1."""
    algo = inputs.algo
    single = algo.group_of_one
    if algo.scale_by_group_std:
        advantages_N = group_relative(
            inputs.totals_N,
            inputs.groups_N,
            unbiased=algo.group_std == "unbiased",
            of_all=algo.group_std_over == "step",
            counted_N=inputs.experience.per_sample.get("rewarded"),
            eps=algo.group_std_eps,
            floor=algo.group_std_floor,
            group_of_one=single,
        )
    else:
        advantages_N = group_centred(inputs.totals_N, inputs.groups_N, group_of_one=single)
    if (kl_N := inputs.kl_N()) is not None:
        advantages_N = advantages_N - inputs.kl_coef * group_centred(
            kl_N, inputs.groups_N, group_of_one=algo.group_of_one
        )
    return {"advantages": inputs.token_advantages(advantages_N)}


_WHITENING_EPS = 1e-8
"""Added to the variance; verl, TRL and OpenRLHF have the same."""

_FUNCTIONS: Mapping[str, Callable[[AdvantageInputs], Columns]] = {
    "gae": _gae,
    "reinforce": _reinforce,
    "reinforce_plus_plus": _reinforce,
    "reinforce_plus_plus_baseline": _reinforce_baseline,
    "remax": _remax,
    "leave_one_out": _leave_one_out,
    "group_relative": _group_relative,
}
ADVANTAGES: Mapping[str, Advantage] = {
    name: Advantage(
        compute=_FUNCTIONS[name],
        writes=("advantages", "returns") if "values" in traits.reads else ("advantages",),
        **traits._asdict(),
    )
    for name, traits in TRAITS.items()
}
"""Built-in advantages."""


def add_advantages(
    experience: Experience, algo: AlgoConfig, kl_coef: float | None = None, *, first: bool = False
) -> Experience:
    """Add advantages (and, with a critic, returns) of the response tokens on this rank. Collective.

    `kl_coef`: coefficient of this step; None: the configured one. `first`: the first step of this process, in which an
    advantage of the user's own is called twice
    """
    coef = algo.kl.coef if kl_coef is None else kl_coef
    coef = coef if algo.kl.placement == "reward" else 0.0
    if is_path(algo.advantage):
        advantage = load_advantage(algo.advantage)
        whole = whole_step(experience, advantage, has_kl=coef > 0)
        columns = own_columns(
            algo.advantage, advantage, whole, lambda copied: AdvantageInputs(copied, algo, coef), twice=first
        )
        made = {name: experience.held(column) for name, column in columns.items()}
    else:
        inputs = AdvantageInputs(experience, algo, coef)
        entry = ADVANTAGES[algo.advantage]
        lengths_N = inputs.like.lengths_N
        made = {name: Ragged(x_T, lengths_N) for name, x_T in entry.compute(inputs).items()}
        assert set(made) == set(entry.writes), f"{algo.advantage} wrote {sorted(made)}"
    if algo.whitens and algo.whiten_over == "step":
        counted_N, column = experience.per_sample.get("trained"), made["advantages"]
        made["advantages"] = Ragged(whitened(experience, column.values_T, counted_N, algo), column.lengths_N)
    return experience.with_columns(made)


def total_rewards(experience: Experience) -> Tensor:
    """Reward of each response, including the rewards of its tokens, [N]."""
    rewards_N, column = experience.per_sample["rewards"], experience.columns.get("token_rewards")
    token_sums_N = experience.per_sample.get(TOKEN_REWARDS)
    if token_sums_N is None and column is not None:
        assert experience.holding is None, f"no {TOKEN_REWARDS} beside a column that is not whole"
        token_sums_N = packed_sums(column.values_T, column.cu_seqlens)
    return rewards_N if token_sums_N is None else rewards_N + token_sums_N


def whitened(experience: Experience, advantages_T: Tensor, counted_N: Tensor | None, algo: AlgoConfig) -> Tensor:
    """(A - mean) / deviation, over the tokens of the samples that `counted_N` [N] bool marks (None: all) on all ranks;
    zero for the other samples. Collective."""
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
    """Whiten the advantages of one mini-batch, if `algo` whitens per mini-batch. Collective."""
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
