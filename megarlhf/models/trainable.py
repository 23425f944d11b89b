"""Choice of the trained parameters. All others have no gradient, no gradient buffer and no optimizer state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megarlhf.architectures.trained import count_trained, trained_tensors
from megarlhf.config import RoleConfig
from megarlhf.models.build import ModelShard, placements_on


def choose_trained(shard: ModelShard, section: RoleConfig) -> None:
    """Set `requires_grad` of the model's parameters. The ranks of a tensor-parallel group choose the same parameters,
    since they go backward together, even if a rank holds only padding of the vocabulary."""
    trained = trained_tensors(shard.arch, shard.head, freeze=section.freeze, train_only=section.train_only)
    num_trained, total = count_trained(shard.arch, shard.head, trained)
    if num_trained == total:
        return
    parameters, rank = shard.parameters(), shard.mesh.runtime.rank
    is_trained: dict[str, bool] = dict.fromkeys(parameters, False)
    for tp_rank in range(shard.mesh.layout.tp):
        for name, placements in placements_on(shard, rank, tp_rank=tp_rank).by_storage().items():
            is_trained[name] |= any(placement.tensor in trained for placement in placements)
    for name, parameter in parameters.items():
        parameter.requires_grad_(is_trained[name])
    if shard.mesh.layout.pp > 1 or section.recompute in ("layers", "full"):
        for chunk in shard.chunks:
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_begin_graph)


def _begin_graph(embedding: nn.Module, inputs: tuple[Any, ...], hidden: Tensor) -> Tensor:
    """Make the embedding's output require a gradient. The schedule goes backward through every stage, also through one
    without trained parameters; and a recomputed layer passes gradients to its parameters only if its input requires
    one."""
    return hidden.requires_grad_() if torch.is_grad_enabled() and not hidden.requires_grad else hidden
