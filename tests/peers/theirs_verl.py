"""Functions of verl.

A method is called on a stand-in for its object, which has the settings that the method reads.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from tests.peers.inputs import Inputs, N
from tests.peers.ours import CONSTANT
from tests.peers.reach import adaptive, gradient, importable


def _verl() -> Any:
    return importable("verl.trainer.ppo.core_algos")


def verl_gae(inputs: Inputs) -> list[float]:
    """`compute_gae_advantage_return`; verl's rewards hold the KL already, here none."""
    found = _verl().compute_gae_advantage_return(
        inputs.rewards_at_the_end(), inputs.values_NT, inputs.mask_NT, gamma=0.9, lam=0.8
    )
    return [number for grid_NT in found for number in inputs.tokens(grid_NT).tolist()]


def verl_outcome(inputs: Inputs, *, function: str, **options: Any) -> list[float]:
    """`compute_*_outcome_advantage` in groups of five, four, two and one."""
    index = inputs.other_groups_N.numpy()
    found, _ = getattr(_verl(), function)(inputs.rewards_at_the_end(), inputs.mask_NT, index=index, **options)
    return inputs.tokens(found).tolist()


def verl_reinforce(inputs: Inputs) -> list[float]:
    found, _ = _verl().compute_reinforce_plus_plus_outcome_advantage(
        inputs.rewards_at_the_end(), inputs.mask_NT, config=SimpleNamespace(gamma=0.9)
    )
    return inputs.tokens(found).tolist()


def verl_remax(inputs: Inputs) -> list[float]:
    found, _ = _verl().compute_remax_outcome_advantage(inputs.rewards_at_the_end(), inputs.greedy_N, inputs.mask_NT)
    return inputs.tokens(found).tolist()


def verl_policy(
    inputs: Inputs, *, name: str, average: str = "token-mean", correct: bool = False, per_response: bool = False
) -> list[float]:
    """A registered policy loss with clip .2 and .3 and its default dual clip of 3."""
    config = importable("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.3
    )
    config.global_batch_info.update({"loss_scale_factor": CONSTANT})
    weights_NT = None
    if correct:
        log_ratio_NT = inputs.old_logprobs_NT - inputs.rollout_logprobs_NT
        helper = importable("verl.trainer.ppo.rollout_corr_helper")
        weights_NT, _ = helper.compute_rollout_correction_weights(log_ratio_NT, inputs.mask_NT, "token", 1.5)
    advantages_NT = inputs.advantages_N[:, None] * inputs.mask_NT if per_response else inputs.advantages_NT

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        return _verl().get_policy_loss_fn(name)(
            old_log_prob=inputs.old_logprobs_NT, log_prob=logprobs_NT, advantages=advantages_NT,
            response_mask=inputs.mask_NT, loss_agg_mode=average, config=config, rollout_is_weights=weights_NT,
        )[0]  # fmt: skip

    return gradient(inputs, loss_of, inputs.logprobs_NT)


def verl_value(inputs: Inputs) -> list[float]:
    def loss_of(values_NT: Tensor) -> Tensor:
        return _verl().compute_value_loss(
            vpreds=values_NT, returns=inputs.returns_NT, values=inputs.old_values_NT, response_mask=inputs.mask_NT,
            cliprange_value=0.2,
        )[0]  # fmt: skip

    return gradient(inputs, loss_of, inputs.values_NT)


def verl_kl(inputs: Inputs, *, kind: str) -> list[float]:
    return inputs.tokens(_verl().kl_penalty(inputs.logprobs_NT, inputs.ref_logprobs_NT, kind)).tolist()


def verl_correction(inputs: Inputs, *, level: str, threshold: Any) -> list[float]:
    helper = importable("verl.trainer.ppo.rollout_corr_helper")
    log_ratio_NT = inputs.old_logprobs_NT - inputs.rollout_logprobs_NT
    weights_NT, _ = helper.compute_rollout_correction_weights(log_ratio_NT, inputs.mask_NT, level, threshold)
    return inputs.tokens(weights_NT).tolist()


def verl_adaptive(inputs: Inputs) -> list[float]:
    return adaptive(lambda: _verl().AdaptiveKLController(0.1, 0.5, 100), inputs)


def verl_gdpo(inputs: Inputs) -> list[float]:
    """`compute_gdpo_outcome_advantage` of two rewards, weighted 1 and .5."""
    found, _ = _verl().compute_gdpo_outcome_advantage(
        inputs.rewards_at_the_end(),
        inputs.mask_NT,
        index=inputs.groups_N.numpy(),
        config={"gdpo_reward_keys": ["first", "second"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={"first": inputs.eighths_N.numpy(), "second": inputs.greedy_N.numpy()},
        batch={"prompts": inputs.mask_NT[:, :0], "attention_mask": inputs.mask_NT.long()},
    )
    return inputs.tokens(found).tolist()


def verl_overlong(inputs: Inputs) -> list[float]:
    """`DAPORewardManager`, a buffer of 4 of 7 tokens."""
    manager = importable("verl.workers.reward_manager.dapo").DAPORewardManager
    scores = iter(inputs.rewards_N.tolist())
    made = manager(
        tokenizer=MagicMock(eos_token="", decode=lambda *arguments, **options: ""),
        num_examine=0,
        compute_score=lambda **options: next(scores),
        max_resp_len=7,
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=4, penalty_factor=2.0, log=False),
    )
    prompts = torch.ones(N, 1, dtype=torch.int64)
    batch = {
        "prompts": prompts,
        "responses": torch.zeros_like(inputs.mask_NT, dtype=torch.int64),
        "attention_mask": torch.cat([prompts, inputs.mask_NT.long()], 1),
    }
    columns = {"reward_model": [{"ground_truth": ""}] * N, "data_source": [""] * N}
    data = importable("verl").DataProto.from_dict(tensors=batch, non_tensors=columns)
    return made(data).sum(1).tolist()
