"""Optimizer steps in pieces: parameters, with their fp32 copies and moments, are updated a few at a time.

Adam updates each element by itself, so a step in pieces is equal bit for bit. Everything around it (unscaling, norm,
clipping; gathering of a distributed optimizer's parameters) is done for all pieces at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer, MixedPrecisionOptimizer
from torch import Tensor

BYTES_OF_STATE = 12
"""State of an element: fp32 copy and two moments."""
PIECE_BYTES = 512 * 2**20
"""Approximate state of a piece. A parameter is not split."""

_PAIRS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
)
"""Parallel lists of a Megatron optimizer, by group: parameters of the model, and the tensors updated for them."""


@dataclass(frozen=True)
class OptimizerPiece:
    """Some of the parameters that one optimizer updates."""

    optimizer: MegatronOptimizer
    """A single optimizer, not a chain of several."""
    updated: Sequence[Tensor]
    """Updated tensors: fp32 copies, or the model's own parameters where these are fp32."""

    def state(self) -> Iterator[Tensor]:
        """Tensors that only the optimizer needs, as far as they exist."""
        for tensor in self.updated:
            yield tensor
            for value in self.optimizer.optimizer.state.get(tensor, {}).values():
                if isinstance(value, Tensor) and value.numel() > 1:
                    yield value

    @property
    def is_new(self) -> bool:
        """True if moments are missing, which the first step makes."""
        return any(not self.optimizer.optimizer.state.get(tensor) for tensor in self.updated)

    def make_state(self) -> None:
        """Make the moments, as zeros."""
        inner = self.optimizer.optimizer
        with _restricted(self.optimizer, {id(tensor) for tensor in self.updated}):
            self.optimizer.init_state_fn(inner, self.optimizer.config)
        if counts_per_parameter(inner):
            for tensor in self.updated:
                inner.state[tensor].setdefault("step", torch.tensor(0.0, dtype=torch.float32))

    def step(self) -> None:
        """Update the piece."""
        with _restricted(self.optimizer, {id(tensor) for tensor in self.updated}):
            # Not a distributed optimizer's own method, which also gathers the parameters.
            base = MixedPrecisionOptimizer if isinstance(self.optimizer, MixedPrecisionOptimizer) else FP32Optimizer
            base.step_with_ready_grads(self.optimizer)


def pieces_of(optimizer: MegatronOptimizer, largest: int) -> list[OptimizerPiece]:
    """Split everything that the optimizer updates into pieces of about `largest` bytes of state."""
    pieces = []
    for single in optimizers_in(optimizer):
        if getattr(single, "is_stub_optimizer", False):
            continue
        updated = [tensor for group in single.optimizer.param_groups for tensor in group["params"]]
        piece: list[Tensor] = []
        for count, tensor in enumerate(updated, 1):
            piece.append(tensor)
            nbytes = BYTES_OF_STATE * sum(tensor.numel() for tensor in piece)
            if nbytes >= largest or count == len(updated):
                pieces.append(OptimizerPiece(single, piece))
                piece = []
    return pieces


def step_in_pieces(
    optimizer: MegatronOptimizer, pieces: Sequence[OptimizerPiece], before_piece: Callable[[int], None] | None = None
) -> None:
    """`optimizer.step_with_ready_grads()`, piece by piece. `before_piece(index)` is called before each.

    Parameters are gathered once. With an optimizer of experts beside another, upstream gathers all of them twice.
    """
    for n, piece in enumerate(pieces):
        groups = piece.optimizer.optimizer.param_groups
        steps = [group.get("step") for group in groups]
        if before_piece is not None:
            before_piece(n)
        piece.step()
        if any(other.optimizer is piece.optimizer for other in pieces[n + 1 :]):
            # Fused optimizers count the steps of a group; the group's step is not complete yet.
            for group, step in zip(groups, steps, strict=True):
                group.pop("step", None)
                if step is not None:
                    group["step"] = step
    sharded = [single for single in optimizers_in(optimizer) if isinstance(single, DistributedOptimizer)]
    for chunk in {id(chunk): chunk for single in sharded for chunk in single.model_chunks}.values():
        chunk.start_param_sync(force_dispatch=True)


def optimizers_in(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The members of a chained optimizer, or the optimizer itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def counts_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """True for torch's AdamW, which counts its steps per parameter. Fused optimizers count per group."""
    return isinstance(optimizer, torch.optim.Adam)


@contextlib.contextmanager
def _restricted(optimizer: MegatronOptimizer, updated: set[int]) -> Iterator[None]:
    """Scope in which the optimizer has only these tensors, given by id."""
    groups = optimizer.optimizer.param_groups
    params = [group["params"] for group in groups]
    lists = {name: getattr(optimizer, name) for pair in _PAIRS for name in pair if hasattr(optimizer, name)}
    for group in groups:
        group["params"] = [tensor for tensor in group["params"] if id(tensor) in updated]
    for models, mains in _PAIRS:
        if models in lists:
            kept = [
                [(model, main) for model, main in zip(*pair, strict=True) if id(main) in updated]
                for pair in zip(lists[models], lists[mains], strict=True)
            ]
            setattr(optimizer, models, [[model for model, _ in group] for group in kept])
            setattr(optimizer, mains, [[main for _, main in group] for group in kept])
    try:
        yield
    finally:
        for group, whole in zip(groups, params, strict=True):
            group["params"] = whole
        for name, whole in lists.items():
            setattr(optimizer, name, whole)
