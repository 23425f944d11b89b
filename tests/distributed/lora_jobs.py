"""What the rank processes do with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarlhf.config import SFTConfig
from megarlhf.models.build import placements_on
from megarlhf.models.role import Role, build_role
from megarlhf.parallel.mesh import GroupCache
from megarlhf.runtime import Runtime
from megarlhf.weights.transport.storages import view


def draw_adapter(role: Role, std: float = 0.2) -> None:
    """Numbers in every B, the same at every layout; a new one is zero, and its A would have no gradient."""
    live = role.shard.parameters()
    with torch.no_grad():
        for placement in placements_on(role.shard, role.mesh.runtime.rank).placements:
            if placement.tensor.endswith(".lora_B.weight"):
                shape = placements_on(role.shard, role.mesh.runtime.rank).tensors[placement.tensor]
                seed = sum(map(ord, placement.tensor))
                whole = std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
                box = tuple(slice(a, b) for a, b in zip(placement.box.start, placement.box.stop, strict=True))
                view(placement, live).copy_(whole[box])


def lora_gradients(runtime: Runtime, config: dict[str, Any], merged: str) -> dict[str, Any]:
    """Loss, gradients and weights of the first step of an adapter whose B is not zero; its model is exported first."""
    from megarlhf.trainers.sft import SupervisedFineTuning
    from tests.distributed.jobs import Arrays, _sft_samples, record_gradients, train_once, weights_of

    cfg = SFTConfig.model_validate(config)
    objective, samples = SupervisedFineTuning(cfg), _sft_samples(cfg)
    actor = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=1)
    draw_adapter(actor)
    actor.export(Path(merged))
    gradients: list[Arrays] = []
    record_gradients(actor, gradients)
    weights = weights_of(actor)
    step = train_once(objective, actor, samples[: cfg.train.mini_batch_samples])
    return {"loss": step["loss"], "grad_norm": step["grad_norm"], "gradients": gradients[0], "weights": weights}


def lora_exports(runtime: Runtime, config: dict[str, Any], directory: str, draw: bool = True) -> None:
    """What an actor exports before it is trained; `draw`: with numbers in every B."""
    cfg = SFTConfig.model_validate(config)
    actor = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0)
    if draw:
        draw_adapter(actor)
    actor.export(Path(directory))
