"""Megatron-Core's optimizer in pieces: its parameters, with their fp32 copies and moments, are updated some at a time.

Adam looks at each element by itself, so a step in pieces is the same step to the bit. What Megatron-Core does around it
(unscaling, norm, clipping; gathering of a distributed optimizer's parameters) is done for all pieces at once.
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
"""Of an element: fp32 copy and two moments."""
PIECE_BYTES = 512 * 2**20
"""Of a piece's state, about; a parameter is not split."""

_PAIRS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
)
"""Lists of a Megatron optimizer, by group, which stand beside each other: parameters of the model, and what it updates
for them."""


@dataclass(frozen=True)
class OptimizerPiece:
    """Some of the parameters that one optimizer updates."""

    optimizer: MegatronOptimizer
    """None of several in one."""
    updated: Sequence[Tensor]
    """What it updates: fp32 copies, or the model's own parameters where these are fp32."""

    def state(self) -> Iterator[Tensor]:
        """The tensors that only the optimizer needs, so far as they have been made."""
        inner = self.optimizer.optimizer
        for tensor in self.updated:
            yield tensor
            yield from (
                value
                for value in inner.state.get(tensor, {}).values()
                if isinstance(value, Tensor) and value.numel() > 1
            )

    @property
    def is_new(self) -> bool:
        """Whether moments are missing, which the first step makes."""
        return any(not self.optimizer.optimizer.state.get(tensor) for tensor in self.updated)

    def make_state(self) -> None:
        """Make them, as zeros."""
        inner = self.optimizer.optimizer
        with _restricted(self.optimizer, {id(tensor) for tensor in self.updated}):
            self.optimizer.init_state_fn(inner, self.optimizer.config)
        if counts_per_parameter(inner):
            for tensor in self.updated:
                inner.state[tensor].setdefault("step", torch.tensor(0.0, dtype=torch.float32))

    def step(self) -> None:
        """Update these alone."""
        with _restricted(self.optimizer, {id(tensor) for tensor in self.updated}):
            # Without what a distributed optimizer adds, which gathers the parameters.
            base = MixedPrecisionOptimizer if isinstance(self.optimizer, MixedPrecisionOptimizer) else FP32Optimizer
            base.step_with_ready_grads(self.optimizer)


def pieces_of(optimizer: MegatronOptimizer, largest: int) -> list[OptimizerPiece]:
    """All that it updates, cut into pieces of about `largest` bytes of state."""
    pieces = []
    for each in optimizers_in(optimizer):
        if getattr(each, "is_stub_optimizer", False):
            continue
        updated = [tensor for group in each.optimizer.param_groups for tensor in group["params"]]
        held: list[Tensor] = []
        for number, tensor in enumerate(updated, 1):
            held.append(tensor)
            nbytes = BYTES_OF_STATE * sum(tensor.numel() for tensor in held)
            if nbytes >= largest or number == len(updated):
                pieces.append(OptimizerPiece(each, held))
                held = []
    return pieces


def step_in_pieces(
    optimizer: MegatronOptimizer, pieces: Sequence[OptimizerPiece], arrive: Callable[[int], None] | None = None
) -> None:
    """`optimizer.step_with_ready_grads()`, piece by piece; before each, `arrive(its number)` is called.

    Where one of several optimizers is the experts', upstream gathers all parameters after each of them; here they are
    gathered once.
    """
    for number, piece in enumerate(pieces):
        before = [group.get("step") for group in piece.optimizer.optimizer.param_groups]
        if arrive is not None:
            arrive(number)
        piece.step()
        if any(other.optimizer is piece.optimizer for other in pieces[number + 1 :]):
            # Fused optimizers count the steps of a group, which is not through yet.
            for group, step in zip(piece.optimizer.optimizer.param_groups, before, strict=True):
                group.pop("step", None)
                if step is not None:
                    group["step"] = step
    sharded = [each for each in optimizers_in(optimizer) if isinstance(each, DistributedOptimizer)]
    for chunk in {id(chunk): chunk for each in sharded for chunk in each.model_chunks}.values():
        chunk.start_param_sync(force_dispatch=True)


def optimizers_in(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Those that it is a chain of, or itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def counts_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """torch's AdamW counts its steps for each parameter, the fused ones for each group."""
    return isinstance(optimizer, torch.optim.Adam)


@contextlib.contextmanager
def _restricted(optimizer: MegatronOptimizer, updated: set[int]) -> Iterator[None]:
    """Inside, the optimizer knows these tensors only."""
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
