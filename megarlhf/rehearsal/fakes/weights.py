"""Weights of a rehearsal: memory of the right size, and no numbers in it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megarlhf.architectures.placements import Head
from megarlhf.config import ModelConfig
from megarlhf.models.build import ModelShard, placements_on
from megarlhf.models.settings import DTYPES
from megarlhf.weights.checkpoint.dtype import resolve_dtype
from megarlhf.weights.transport.storages import check_storages


class UninitializedWeights:
    """In place of a checkpoint. What a checkpoint says of its dtype is read where there is one."""

    def __init__(self, built: Callable[[ModelShard], None]) -> None:
        """`built` is told each shard."""
        self._built = built

    def dtype(self, role: str, model: ModelConfig, head: Head) -> torch.dtype:
        return DTYPES[resolve_dtype(role, model, head).name]

    def load(self, shard: ModelShard, model: ModelConfig, *, seed: int, new_head: bool) -> None:
        """Every parameter must have the shape that the architecture's table says, as before a real load."""
        check_storages(placements_on(shard, shard.mesh.runtime.rank), shard.parameters())
        if shard.mesh.is_member:
            self._built(shard)
