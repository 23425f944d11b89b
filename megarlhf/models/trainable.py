"""What of a role's model is trained: the rest has no gradient, no buffer for one and no optimizer state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megarlhf.architectures.trained import count_trained, trained_tensors
from megarlhf.config import RoleConfig
from megarlhf.models.build import ModelShard, placements_on


def choose_trained(shard: ModelShard, section: RoleConfig) -> None:
    """Mark the parameters of a model that is going to be trained: alike on the ranks of a tensor-parallel group, which
    go backward together, though one may have nothing but padding of a vocabulary."""
    trained = trained_tensors(shard.arch, shard.head, freeze=section.freeze, train_only=section.train_only)
    number, total = count_trained(shard.arch, shard.head, trained)
    if number == total:
        return
    live, rank = shard.parameters(), shard.mesh.runtime.rank
    is_trained: dict[str, bool] = dict.fromkeys(live, False)
    for tp_rank in range(shard.mesh.layout.tp):
        for name, placements in placements_on(shard, rank, tp_rank=tp_rank).by_storage().items():
            is_trained[name] |= any(placement.tensor in trained for placement in placements)
    for name, parameter in live.items():
        parameter.requires_grad_(is_trained[name])
    if shard.mesh.layout.pp > 1 or section.recompute in ("layers", "full"):
        for chunk in shard.chunks:
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_begin_graph)


def _begin_graph(embedding: nn.Module, inputs: tuple[Any, ...], hidden: Tensor) -> Tensor:
    """What a stage that has nothing to train hands on needs a gradient all the same, for the schedule goes backward
    through every stage; and a layer that is computed again passes no gradient to its parameters unless its input needs
    one."""
    return hidden.requires_grad_() if torch.is_grad_enabled() and not hidden.requires_grad else hidden
