"""Weights of a rehearsal: memory of the right size, without numbers."""

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
    """Replacement of a checkpoint. The dtype is read from a checkpoint if there is one."""

    def __init__(self, built: Callable[[ModelShard], None]) -> None:
        """`built` gets each shard."""
        self._built = built

    def dtype(self, role: str, model: ModelConfig, head: Head) -> torch.dtype:
        return DTYPES[resolve_dtype(role, model, head).name]

    def load(self, shard: ModelShard, model: ModelConfig, *, seed: int, new_head: bool) -> None:
        """Check, as before a real load, that every parameter has the shape of the architecture's table."""
        check_storages(placements_on(shard, shard.mesh.runtime.rank), shard.parameters())
        if shard.mesh.is_member:
            self._built(shard)
