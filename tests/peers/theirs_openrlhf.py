"""Functions of OpenRLHF.

A method is called on a stand-in for its object, which has the settings that the method reads.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.peers.inputs import GROUP, Inputs, N
from tests.peers.reach import adaptive, gradient, importable


def openrlhf_advantages(inputs: Inputs, *, estimator: str, kl_coef: float = 0.0, gamma: float = 1.0) -> list[float]:
    """`RemoteExperienceMaker.compute_advantages_and_returns`, all responses in one experience."""
    maker = importable("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=0.8, no_std_norm=False)
    reward = SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage), reward=reward, rollout=SimpleNamespace(n_samples_per_prompt=GROUP)
    )
    fake = SimpleNamespace(
        strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=kl_coef), advantage_estimator=estimator
    )
    for name in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(fake, name, partial(getattr(maker, name), fake))
    experience = SimpleNamespace(
        index=list(range(N)),
        rewards=inputs.rewards_N.clone(),
        kl=(inputs.old_logprobs_NT - inputs.ref_logprobs_NT) * inputs.mask_NT,
        action_mask=inputs.mask_NT,
        values=inputs.values_NT,
        info={},
    )
    maker.compute_advantages_and_returns(fake, [experience])
    grids = (experience.advantages, experience.returns) if estimator == "gae" else (experience.advantages,)
    return [number for grid_NT in grids for number in inputs.tokens(grid_NT).tolist()]


def openrlhf_policy(
    inputs: Inputs, *, correct: bool = False, per_response: bool = False, **options: Any
) -> list[float]:
    """`PolicyLoss` with clip .2 and .3."""
    loss = importable("openrlhf.models.loss").PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.3, **options)
    advantages_NT = inputs.advantages_N[:, None] * inputs.mask_NT if per_response else inputs.advantages_NT
    rollout_NT = inputs.rollout_logprobs_NT if correct else None

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        return loss(logprobs_NT, inputs.old_logprobs_NT, advantages_NT, inputs.mask_NT, rollout_NT)[0]

    return gradient(inputs, loss_of, inputs.logprobs_NT)


def openrlhf_overlong(inputs: Inputs) -> list[float]:
    """`apply_overlong_penalty`, a buffer of 4 of 7 tokens."""
    experience = SimpleNamespace(rewards=inputs.rewards_N.clone(), response_length=inputs.lengths_N)
    importable("openrlhf.trainer.ppo_utils.length_penalty").apply_overlong_penalty(
        [experience], max_new_tokens=7, overlong_buffer_len=4, overlong_penalty_factor=2.0
    )
    return experience.rewards.tolist()


def openrlhf_value(inputs: Inputs, *, clip: float | None) -> list[float]:
    loss = importable("openrlhf.models.loss").ValueLoss(clip)
    return gradient(
        inputs,
        lambda values_NT: loss(values_NT, inputs.old_values_NT, inputs.returns_NT, inputs.mask_NT),
        inputs.values_NT,
    )


def openrlhf_kl(inputs: Inputs, *, kind: str) -> list[float]:
    """`compute_approx_kl`; it computes in fp32."""
    estimate = importable("openrlhf.models.utils").compute_approx_kl
    return inputs.tokens(estimate(inputs.logprobs_NT, inputs.ref_logprobs_NT, kl_estimator=kind)).tolist()


def openrlhf_adaptive(inputs: Inputs) -> list[float]:
    controller = importable("openrlhf.trainer.ppo_utils.kl_controller").AdaptiveKLController
    return adaptive(lambda: controller(0.1, 0.5, 100), inputs)
