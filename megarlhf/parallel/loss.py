"""Result of a loss on a micro-batch, and reports of a forward with backward and of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from megarlhf.parallel.micro_batch import MicroBatch


class LossOutput(NamedTuple):
    """Result of a loss on one micro-batch."""

    loss: Tensor
    """This micro-batch's contribution to the loss, a scalar."""
    sums: Tensor
    """Sums to be added over the mini-batch, [len(names)], detached."""
    captured: Tensor | None = None
    """Values of this forward that the caller wants back, such as log-probs, detached."""


@dataclass(frozen=True)
class Accumulated:
    """Result of a forward and backward over a mini-batch, beside the gradients."""

    sums: dict[str, float]
    """The loss's sums over the whole mini-batch, the same on every rank; `loss` is among them, without what routers
    add to it, which is `router_aux_loss`."""
    captured: list[Tensor]
    """Tensors that the loss has captured of each of this rank's micro-batches, in their order; on the last stage."""


class Loss(Protocol):
    """A loss on the last stage's output."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the reported sums."""
        ...

    def __call__(self, output: Tensor, batch: MicroBatch, /) -> LossOutput: ...


@dataclass(frozen=True)
class StepResult:
    """Report of an optimizer step, the same on every rank."""

    sums: dict[str, float]
    grad_norm: float
    """Norm before clipping; infinite when the gradient is not finite."""
    skipped: str = ""
    """Reason for skipping the step; empty: it was made."""
