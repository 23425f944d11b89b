"""Our side of the comparison: by the names of tests/peers/theirs.py, what this project computes from the same inputs.

Advantages go the way of a run, through `add_advantages` and a configuration, so that conventions are compared as a user
gets them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarlhf.algo.averaging import response_weights
from megarlhf.algo.kl import adapted_coefficient, kl_estimate, ratio_weighted
from megarlhf.algo.length_shaping import overlong_penalty
from megarlhf.algo.losses import clipped_value_loss
from megarlhf.algo.policy import Bounds, log_ratios, policy_loss
from megarlhf.algo.reward_scaling import group_normalised
from megarlhf.algo.rollout_correction import rollout_correction
from megarlhf.algo.segments import Segments
from megarlhf.columns import Ragged
from megarlhf.config import AlgoConfig
from megarlhf.experience import Experience
from megarlhf.rollouts import Rollouts, VersionRuns
from megarlhf.trainers.rl.advantages import add_advantages
from tests.peers import pairs
from tests.peers.inputs import Inputs

CONSTANT = 9
"""What sums of responses are divided by."""
LEFT_OUT = (2, 7)
"""Responses that are masked."""


def experience(inputs: Inputs, groups_N: Tensor) -> Experience:
    """The table of a step, with rewards of whole responses."""

    def column(grid_NT: Tensor) -> Ragged:
        return Ragged(inputs.tokens(grid_NT), inputs.lengths_N)

    rollouts = Rollouts(
        responses=Ragged(torch.zeros(int(inputs.lengths_N.sum()), dtype=torch.int64), inputs.lengths_N),
        logprobs=column(inputs.rollout_logprobs_NT),
        finished_N=torch.ones(len(groups_N), dtype=torch.bool),
        versions=VersionRuns.constant(0, inputs.lengths_N),
    )
    columns = {
        "old_logprobs": column(inputs.old_logprobs_NT),
        "ref_logprobs": column(inputs.ref_logprobs_NT),
        "values": column(inputs.values_NT),
    }
    table = Experience((torch.tensor([1]),) * len(groups_N), groups_N, rollouts, columns)
    return table.with_per_sample({"rewards": inputs.rewards_N, "greedy_rewards": inputs.greedy_N})


def advantages(inputs: Inputs, *, others: bool = False, returns: bool = False, **algo: Any) -> list[float]:
    """Of the response tokens; `others`: in groups of different sizes."""
    groups_N = inputs.other_groups_N if others else inputs.groups_N
    table = add_advantages(experience(inputs, groups_N), AlgoConfig.model_validate(algo))
    names = ("advantages", "returns") if returns else ("advantages",)
    return [number for name in names for number in table.columns[name].values_T.tolist()]


def policy(
    inputs: Inputs,
    *,
    average: Any = "token",
    block: int | None = None,
    correction: Mapping[str, Any] | None = None,
    per_response: bool = False,
    left_out: Sequence[int] = (),
    kl_coef: float = 0.0,
    surrogate: Any = "clip",
    ratio: Any = "token",
    **bounds: Any,
) -> list[float]:
    """The loss and its gradient at each response token. `left_out`: responses that count in the denominator alone.
    `kl_coef`: of k3 to the reference, weighted by the ratio."""
    responses = Segments.of(inputs.lengths_N)
    logprobs_T = inputs.tokens(inputs.logprobs_NT).requires_grad_()
    old_T = inputs.tokens(inputs.old_logprobs_NT)
    lengths_N = inputs.lengths_N.clone()
    lengths_N[list(left_out)] = 0
    weights_N = response_weights(lengths_N, average, constant=CONSTANT, block=block, count_left_out=bool(left_out))
    weights_T = responses.repeat(weights_N)
    if correction is not None:
        rollout_T = inputs.tokens(inputs.rollout_logprobs_NT)
        weights_T = weights_T * rollout_correction(old_T, rollout_T, responses, **correction).weights_T
    advantages_T = responses.repeat(inputs.advantages_N) if per_response else inputs.tokens(inputs.advantages_NT)
    made = Bounds(**bounds)
    out = policy_loss(
        logprobs_T, old_T, advantages_T, weights_T, responses, surrogate=surrogate, ratio=ratio, bounds=made
    )
    loss = out.loss
    if kl_coef > 0:
        kl_T = kl_estimate(logprobs_T, inputs.tokens(inputs.ref_logprobs_NT), "k3")
        loss = (
            loss + kl_coef * (ratio_weighted(kl_T, log_ratios(logprobs_T, old_T, responses, ratio)) * weights_T).sum()
        )
    (gradient_T,) = torch.autograd.grad(loss, logprobs_T)
    return [float(loss), *gradient_T.tolist()]


def gdpo(inputs: Inputs) -> list[float]:
    """Two rewards, each normalised in its group, weighted 1 and .5, whitened over the tokens."""
    groups_N = inputs.groups_N
    rewards_N = group_normalised(inputs.eighths_N, groups_N) + 0.5 * group_normalised(inputs.greedy_N, groups_N)
    table = experience(inputs, groups_N).with_per_sample({"rewards": rewards_N})
    algo = AlgoConfig(advantage="reinforce", whiten_advantages=True, whiten_variance="unbiased")
    return add_advantages(table, algo).columns["advantages"].values_T.tolist()


def gdpo_over_responses(inputs: Inputs) -> list[float]:
    """Two rewards as above, over the deviation of all sums: as TRL adds them up."""
    groups_N = inputs.groups_N
    first_N, second_N = (group_normalised(x_N, groups_N, eps=1e-4) for x_N in (inputs.eighths_N, inputs.greedy_N))
    table = experience(inputs, groups_N).with_per_sample({"rewards": first_N + 0.5 * second_N})
    algo = AlgoConfig(advantage="grpo", group_std_over="step", group_std_eps=1e-4)
    return add_advantages(table, algo).columns["advantages"].values_T.tolist()


def overlong(inputs: Inputs) -> list[float]:
    """The rewards less the penalty of lengths above 3 of 7, twice their share of the buffer."""
    penalty_N = overlong_penalty(inputs.lengths_N, longest=7, buffer=4, penalty=2.0)
    return (inputs.rewards_N + penalty_N).tolist()


def value(inputs: Inputs, *, clip: float | None, factor: float = 1.0) -> list[float]:
    """The critic's loss and its gradient; `factor` is what others multiply it by."""
    values_T = inputs.tokens(inputs.values_NT).requires_grad_()
    old_T, returns_T = inputs.tokens(inputs.old_values_NT), inputs.tokens(inputs.returns_NT)
    weights_T = Segments.of(inputs.lengths_N).repeat(response_weights(inputs.lengths_N, "token"))
    loss = factor * clipped_value_loss(values_T, old_T, returns_T, weights_T, clip=clip).loss
    (gradient_T,) = torch.autograd.grad(loss, values_T)
    return [float(loss), *gradient_T.tolist()]


def kl(inputs: Inputs, *, kind: Any, clamp: float | None = None) -> list[float]:
    """The estimate at each response token."""
    logprobs_T, ref_T = inputs.tokens(inputs.logprobs_NT), inputs.tokens(inputs.ref_logprobs_NT)
    return kl_estimate(logprobs_T, ref_T, kind, clamp).tolist()


def controller(inputs: Inputs) -> list[float]:
    """The coefficient after each of five steps of 12 samples."""
    coefs = [0.1]
    for measured in inputs.rewards_N.abs().tolist()[:5]:
        coefs.append(adapted_coefficient(coefs[-1], measured, 0.5, 12, 100))
    return coefs[1:]


def correction(inputs: Inputs, **options: Any) -> list[float]:
    """The weight of each response token."""
    old_T, rollout_T = inputs.tokens(inputs.old_logprobs_NT), inputs.tokens(inputs.rollout_logprobs_NT)
    return rollout_correction(old_T, rollout_T, Segments.of(inputs.lengths_N), **options).weights_T.tolist()


UNBIASED = {"whiten_variance": "unbiased"}
VERL_GROUPS = {"others": True, "group_of_one": "reward", "group_std_eps": 1e-6}
IN_REWARD = {"kl": {"coef": 0.1, "placement": "reward"}}
BY_TOKEN = {"kl": {"coef": 0.1, "placement": "reward", "credit": "token"}}
GSPO = {"ratio": "geometric", "average": "sequence", "low": 0.2, "high": 0.3}
TIS = {"kind": "truncate", "level": "token", "low": 0.0, "high": 1.5}
SEQ_MASK_TIS = {"kind": "mask", "level": "geometric", "low": 0.8, "high": 1.2, "mask_weight": "token"}
ICEPOP = {"kind": "mask", "level": "token", "low": 0.7, "high": 1.4}

OURS: dict[str, Callable[[Inputs], list[float]]] = {
    # verl
    "verl: gae": partial(advantages, returns=True, advantage="gae", gamma=0.9, lam=0.8, **UNBIASED),
    "verl: grpo": partial(advantages, advantage="grpo", **VERL_GROUPS),
    "verl: grpo without std": partial(advantages, advantage="dr_grpo", **VERL_GROUPS),
    "verl: rloo": partial(advantages, advantage="rloo", others=True, group_of_one="reward"),
    "verl: reinforce++": partial(advantages, advantage="reinforce++", gamma=0.9, **UNBIASED),
    "verl: reinforce++ baseline": partial(
        advantages, advantage="reinforce++_baseline", others=True, group_of_one="reward", **UNBIASED
    ),
    "verl: remax": partial(advantages, advantage="remax"),
    "verl: vanilla": partial(policy, low=0.2, high=0.3, dual=3.0),
    "verl: vanilla, seq-mean-token-mean": partial(policy, low=0.2, high=0.3, dual=3.0, average="sequence"),
    "verl: vanilla, seq-mean-token-sum-norm": partial(policy, low=0.2, high=0.3, dual=3.0, average="constant"),
    "verl: vanilla with rollout correction": partial(policy, low=0.2, high=0.3, dual=3.0, correction=TIS),
    "verl: gspo": partial(policy, per_response=True, **GSPO),
    "verl: sapo": partial(policy, surrogate="sapo", average="sequence"),
    "verl: cispo": partial(policy, surrogate="cispo", low=0.2, high=0.3),
    "verl: value": partial(value, clip=0.2),
    "verl: k1": partial(kl, kind="k1"),
    "verl: abs": partial(kl, kind="abs"),
    "verl: k2": partial(kl, kind="k2"),
    "verl: low_var_kl": partial(kl, kind="k3", clamp=10.0),
    "verl: adaptive kl": controller,
    "verl: rollout is by token": partial(correction, **TIS),
    "verl: rollout is by sequence": partial(correction, **{**TIS, "level": "sequence"}),
    "verl: icepop": partial(correction, **ICEPOP),
    "verl: gdpo": gdpo,
    "verl: overlong": overlong,
    # OpenRLHF
    "openrlhf: gae": partial(advantages, returns=True, advantage="gae", gamma=0.9, lam=0.8, **IN_REWARD),
    "openrlhf: reinforce": partial(advantages, advantage="reinforce++", gamma=0.9, **IN_REWARD),
    "openrlhf: reinforce_baseline": partial(advantages, advantage="reinforce++_baseline", **IN_REWARD),
    "openrlhf: rloo": partial(advantages, advantage="rloo"),
    "openrlhf: group_norm": partial(advantages, advantage="grpo", group_std_eps=1e-9),
    "openrlhf: dr_grpo": partial(advantages, advantage="dr_grpo"),
    "openrlhf: rloo with kl": partial(advantages, advantage="rloo", **BY_TOKEN),
    "openrlhf: group_norm with kl": partial(advantages, advantage="grpo", group_std_eps=1e-9, **BY_TOKEN),
    "openrlhf: dr_grpo with kl": partial(advantages, advantage="dr_grpo", **BY_TOKEN),
    "openrlhf: overlong": overlong,
    "openrlhf: seq-mask-tis": partial(policy, low=0.2, high=0.3, correction=SEQ_MASK_TIS),
    "openrlhf: ppo": partial(policy, low=0.2, high=0.3),
    "openrlhf: ppo by sequence": partial(policy, low=0.2, high=0.3, average="sequence"),
    "openrlhf: dual clip": partial(policy, low=0.2, high=0.3, dual=3.0),
    "openrlhf: gspo": partial(policy, per_response=True, **GSPO),
    "openrlhf: icepop": partial(policy, low=0.2, high=0.3, correction=ICEPOP),
    "openrlhf: value": partial(value, clip=0.2),
    "openrlhf: value without clip": partial(value, clip=None),
    "openrlhf: k1": partial(kl, kind="k1", clamp=10.0),
    "openrlhf: k2": partial(kl, kind="k2", clamp=10.0),
    "openrlhf: k3": partial(kl, kind="k3", clamp=10.0),
    "openrlhf: adaptive kl": controller,
    "openrlhf: dpo": partial(pairs.ours, loss="dpo"),
    "openrlhf: dpo, smoothed": partial(pairs.ours, loss="dpo", label_smoothing=0.2),
    "openrlhf: ipo": partial(pairs.ours, loss="ipo"),
    "openrlhf: reward model": pairs.our_scores,
    "openrlhf: reward model, margin": partial(pairs.our_scores, margin=True),
    # TRL
    "trl: advantages": partial(advantages, advantage="grpo", group_std_eps=1e-4),
    "trl: advantages, scale_rewards none": partial(advantages, advantage="dr_grpo"),
    "trl: advantages, scale_rewards batch": partial(
        advantages, advantage="grpo", group_std_eps=1e-4, group_std_over="step"
    ),
    "trl: advantages, normalize_then_sum": gdpo_over_responses,
    "trl: grpo": partial(policy, per_response=True, low=0.2, high=0.3, average="sequence"),
    "trl: grpo with kl": partial(policy, per_response=True, low=0.2, high=0.3, average="sequence", kl_coef=0.1),
    "trl: gspo with kl": partial(policy, per_response=True, kl_coef=0.1, **GSPO),
    "trl: grpo, responses left out": partial(
        policy, per_response=True, low=0.2, high=0.3, average="sequence", left_out=LEFT_OUT
    ),
    "trl: dr_grpo, responses left out": partial(
        policy, per_response=True, low=0.2, high=0.3, average="constant", left_out=LEFT_OUT
    ),
    "trl: bnpo": partial(policy, per_response=True, low=0.2, high=0.3, average="bnpo", block=12),
    "trl: bnpo of four forwards": partial(policy, per_response=True, low=0.2, high=0.3, average="bnpo", block=3),
    "trl: dr_grpo": partial(policy, per_response=True, low=0.2, high=0.3, average="constant"),
    "trl: dapo": partial(policy, per_response=True, low=0.2, high=0.3),
    "trl: delta": partial(policy, per_response=True, low=0.2, high=0.3, average="sequence", delta=1.6),
    "trl: gspo": partial(policy, per_response=True, **GSPO),
    "trl: cispo": partial(policy, per_response=True, surrogate="cispo", low=None, high=0.5),
    "trl: sapo": partial(policy, per_response=True, surrogate="sapo", average="sequence"),
    "trl: truncated importance sampling": partial(
        policy, per_response=True, low=0.2, high=0.3, average="sequence", correction=TIS
    ),
    "trl: dpo": partial(pairs.ours, loss="dpo"),
    "trl: dpo with likelihood": partial(pairs.ours, loss="dpo", sft=True),
    "trl: ipo": partial(pairs.ours, loss="ipo", means=True),
    "trl: kto": partial(pairs.ours, loss="kto", desirable_weight=1.5, undesirable_weight=0.75),
    "trl: simpo": partial(pairs.ours, loss="simpo", means=True, margin=0.4, label_smoothing=0.1),
    "trl: orpo": partial(pairs.ours, loss="orpo", means=True),
    "trl: reward model": pairs.our_scores,
    "trl: reward model, margin and centering": partial(pairs.our_scores, margin=True, center=0.01),
}
