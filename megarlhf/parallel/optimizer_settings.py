"""Translation of `OptimConfig` into Megatron-Core's settings."""

from __future__ import annotations

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarlhf.config import OptimConfig


def optimizer_config(optim: OptimConfig, bf16: bool, shard: bool) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=shard,
    )


def lr_scheduler(optimizer: MegatronOptimizer, optim: OptimConfig, num_steps: int) -> OptimizerParamScheduler:
    """The learning rates of `OptimConfig`. Megatron counts completed steps, so without the shift by one it would begin
    at rate 0."""
    first = max(1, optim.warmup_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=optim.lr / first,
        max_lr=optim.lr,
        min_lr=optim.lr if optim.schedule == "constant" else optim.min_lr,
        lr_warmup_steps=first - 1,
        lr_decay_steps=max(num_steps, first),
        lr_decay_style=optim.schedule,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
