"""The load-balancing loss of a role's experts over micro-batches, ranks and pipeline stages.

It is made where the routers are, on every pipeline stage: nothing of it travels with the main loss. A sequence is whole
within a micro-batch, and on the ranks of one tensor- and context-parallel group; the number of sequences of the
mini-batch and the number of layers are known before the first forward. So a layer's part of the loss is finished when
the layer runs, and its gradient can start there.

Legend: B rows and S columns of a micro-batch's grid, S' columns of it that are this rank's, K its sequences, T tokens
that a rank routes, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algo.balance import count_choices, sequence_balance
from megarlhf.architectures.architecture import Architecture
from megarlhf.parallel.batching import MicroBatchLayout
from megarlhf.parallel.context import ContextShare, ranges
from megarlhf.parallel.mesh import Mesh

ROUTER_AUX_LOSS = "router_aux_loss"
"""What the loss is called among the sums of a mini-batch."""


class RouterBalance:
    """What a role's routers add to the loss: `coefficient` x the mean over layers and over the mini-batch's sequences
    of `algo.balance.sequence_balance`."""

    def __init__(self, coefficient: float, arch: Architecture, mesh: Mesh) -> None:
        self.coefficient = coefficient
        self._arch, self._mesh = arch, mesh
        device = mesh.runtime.device
        self._share = torch.zeros((), device=device)
        """Of one layer and one sequence in the mean."""
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        """What this rank has of the mean, since `begin`: over all ranks it adds up to the mean."""
        self.scale: Callable[[Tensor], Tensor] = lambda loss: loss
        """What the main loss is multiplied by before its backward."""

    def begin(self, layouts: Sequence[MicroBatchLayout | None]) -> None:
        """Before the first forward of a mini-batch, of which these are this data-parallel rank's micro-batches.
        Collective."""
        known = [layout for layout in layouts if layout is not None]
        assert len(known) == len(layouts), "a micro-batch whose sequences are not known"
        number = torch.tensor(float(sum(len(layout.sequences) for layout in known)), device=self.total.device)
        if self._mesh.layout.dp > 1:
            dist.all_reduce(number, group=self._mesh.groups.dp)
        self._share = 1.0 / (self._arch.num_layers * number)
        self.total.zero_()

    def sequences(
        self, layout: MicroBatchLayout | None, share: ContextShare | None, device: torch.device
    ) -> Tensor | None:
        """Of each token that this rank routes the number of its sequence; K for those of none. None where K = 0.

        Returns: [S', B, K] int64, in which the last axis repeats the number and takes no memory: Megatron-Core hands a
        tensor through its layers and no number beside it.
        """
        if layout is None or not layout.sequences:
            return None
        num_sequences = len(layout.sequences)
        lengths_K = torch.tensor(layout.lengths, dtype=torch.int64)
        sequence_X = torch.full((layout.rows * layout.columns,), num_sequences, dtype=torch.int64)
        sequence_X[ranges(torch.tensor(layout.starts, dtype=torch.int64), lengths_K)] = torch.arange(
            num_sequences
        ).repeat_interleave(lengths_K)
        sequence_BS = sequence_X.view(layout.rows, layout.columns).to(device)
        if share is not None:
            sequence_BS = share.cut(sequence_BS)
        if (tp := self._mesh.layout.tp) > 1:  # experts have sequence parallelism: a rank routes a stretch
            sequence_BS = sequence_BS.chunk(tp, 1)[self._mesh.coordinates.tp]
        return sequence_BS.T.contiguous().unsqueeze(-1).expand(-1, -1, num_sequences)

    def added(self, probs_TE: Tensor, logits_TE: Tensor, chosen_TE: Tensor, sequence_SBK: Tensor) -> Tensor:
        """A layer's probabilities as they are; their backward also starts that of the layer's part of the loss.

        Shapes: probs_TE, logits_TE [T, E] fp32, chosen_TE [T, E] bool, sequence_SBK as `sequences` returns it
        """
        sequence_T, num_sequences = sequence_SBK[..., 0].flatten(), sequence_SBK.size(-1)
        counts_KE = count_choices(chosen_TE, sequence_T, num_sequences)
        if self._mesh.layout.tp * self._mesh.layout.cp > 1:
            dist.all_reduce(counts_KE, group=self._mesh.groups.tp_cp)
        scores_TE = logits_TE.float().softmax(-1)
        part = sequence_balance(scores_TE, counts_KE, sequence_T, self._arch.experts_per_token) * self._share
        self.total += part.detach()
        beside: Tensor = _Beside.apply(probs_TE, part * self.coefficient, self.scale)
        return beside


class _Beside(torch.autograd.Function):
    """A tensor on the way of the main loss, and a loss that is not: its backward begins when the tensor's does.

    Megatron-Core's own has the scale of the main loss in an attribute of its class, for all models of a process.
    """

    @staticmethod
    def forward(ctx: Any, on_the_way: Tensor, loss: Tensor, scale: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return on_the_way.view_as(on_the_way)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return gradients[0], ctx.scale(torch.ones((), dtype=dtype, device=device)), None
