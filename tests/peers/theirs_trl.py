"""Functions of TRL's GRPO; those of pairs are in `pairs.py`.

A method is called on a stand-in for its object, which has the settings that the method reads.
"""

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from tests.peers.inputs import GROUP, Inputs, N
from tests.peers.ours import CONSTANT
from tests.peers.reach import gradient, importable


def trl_policy(inputs: Inputs, *, forwards: int = 1, **options: Any) -> list[float]:
    """`GRPOTrainer._compute_loss` on a stand-in, in one forward or several whose gradients are accumulated."""
    parts = torch.arange(N).split(N // forwards)

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        return torch.stack([_trl_loss(inputs, logprobs_NT, part, forwards, **options) for part in parts]).sum()

    return gradient(inputs, loss_of, inputs.logprobs_NT)


def _trl_loss(
    inputs: Inputs,
    logprobs_NT: Tensor,
    part: Tensor,
    forwards: int,
    *,
    loss_type: str,
    level: str = "token",
    delta: float | None = None,
    high: float = 0.3,
    correct: bool = False,
    beta: float = 0.0,
    left_out: Sequence[int] = (),
) -> Tensor:
    trainer = importable("trl.trainer.grpo_trainer").GRPOTrainer
    settings = SimpleNamespace(
        delta=delta,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        use_bias_correction_kl=True,  # TRL's default
        steps_per_generation=forwards,
    )
    fake = MagicMock()
    fake.configure_mock(
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level=level, beta=beta, args=settings, loss_type=loss_type, epsilon_low=0.2,
        epsilon_high=high, use_vllm=correct, vllm_importance_sampling_correction=correct,
        current_gradient_accumulation_steps=forwards, max_completion_length=CONSTANT, _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    fake.model.training = True
    fake.accelerator.num_processes = 1
    fake.accelerator.gather = lambda x: x
    fake._get_per_token_logps_and_entropies.return_value = (
        logprobs_NT[part], torch.zeros_like(logprobs_NT[part]), None,
    )  # fmt: skip
    log_ratio_NT = inputs.old_logprobs_NT - inputs.rollout_logprobs_NT
    ids = torch.zeros_like(inputs.mask_NT[part], dtype=torch.int64)
    mask_NT = inputs.mask_NT
    mask_NT[list(left_out)] = 0  # as mask_truncated_completions does
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask_NT[part],
        "advantages": inputs.advantages_N[part],
        "old_per_token_logps": inputs.old_logprobs_NT[part],
        "ref_per_token_logps": inputs.ref_logprobs_NT[part],
        "importance_sampling_ratio": log_ratio_NT[part].exp().clamp(max=1.5),
        "num_items_in_batch": mask_NT.sum(),
    }
    return trainer._compute_loss(fake, None, batch)


def trl_advantages(inputs: Inputs, *, scale: str = "group", gdpo: bool = False) -> list[float]:
    """`GRPOTrainer._generate_and_score_completions` on a stand-in that generates these lengths. Of one reward, or with
    `gdpo` of two, weighted 1 and .5."""
    rows = [[0] * length for length in inputs.lengths_N.tolist()]
    fake = MagicMock()
    fake.configure_mock(
        environment_factories=None,
        environments=None,
        tools=None,
        use_vllm=False,
        beta=0.0,
        num_generations=GROUP,
        multi_objective_aggregation="normalize_then_sum" if gdpo else "sum_then_normalize",
        scale_rewards=scale,
        reward_weights=torch.tensor([1.0, 0.5] if gdpo else [1.0], dtype=torch.float64),
        reward_func_names=["reward", "second"][: 1 + gdpo],
        reward_funcs=[None] * (1 + gdpo),
        mask_truncated_completions=False,
        pad_to_multiple_of=None,
        num_iterations=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    fake.accelerator.configure_mock(device=torch.device("cpu"), process_index=0, num_processes=1, gather=lambda x: x)
    fake._tokenizer.pad_token_id = 0
    fake.model.training = True
    fake.args.configure_mock(gradient_accumulation_steps=1, steps_per_generation=1, per_device_train_batch_size=N)
    fake._generate.return_value = ([[0]] * N, rows, None, [""] * N, None, {}, None, None)
    two_N2 = torch.stack([inputs.eighths_N, inputs.greedy_N], 1)
    fake._calculate_rewards.return_value = two_N2 if gdpo else inputs.rewards_N[:, None]
    trainer = importable("trl.trainer.grpo_trainer").GRPOTrainer
    found = trainer._generate_and_score_completions(fake, [{"prompt": ""}] * N)["advantages"]
    return inputs.tokens(found[:, None] * inputs.mask_NT).tolist()
