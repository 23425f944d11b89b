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
from megarlhf.parallel.context import ContextShare
from megarlhf.parallel.mesh import Mesh
from megarlhf.parallel.micro_batch import MicroBatchLayout

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
        tensor through its layers and no number beside it. Where sequences share tokens: [S', B, K] fp32, 1 where a
        token is of a sequence.
        """
        if layout is None or not layout.sequences:
            return None
        num_sequences, tp = len(layout.sequences), self._mesh.layout.tp
        number_R = torch.arange(num_sequences).repeat_interleave(torch.tensor(layout.lengths, dtype=torch.int64))
        if layout.segments:
            belongs_SK = torch.zeros(layout.columns, num_sequences)
            belongs_SK[layout.tokens_R, number_R] = 1.0
            return belongs_SK.chunk(tp)[self._mesh.coordinates.tp if tp > 1 else 0].unsqueeze(1).to(device)
        sequence_X = torch.full((layout.rows * layout.columns,), num_sequences, dtype=torch.int64)
        sequence_X[layout.tokens_R] = number_R
        sequence_BS = sequence_X.view(layout.rows, layout.columns).to(device)
        if share is not None:
            sequence_BS = share.cut(sequence_BS)
        if tp > 1:  # experts have sequence parallelism: a rank routes a stretch
            sequence_BS = sequence_BS.chunk(tp, 1)[self._mesh.coordinates.tp]
        return sequence_BS.T.contiguous().unsqueeze(-1).expand(-1, -1, num_sequences)

    def added(self, probs_TE: Tensor, logits_TE: Tensor, chosen_TE: Tensor, sequence_SBK: Tensor) -> Tensor:
        """A layer's probabilities as they are; their backward also starts that of the layer's part of the loss.

        Shapes: probs_TE, logits_TE [T, E] fp32, chosen_TE [T, E] bool, sequence_SBK as `sequences` returns it
        """
        shared, num_sequences = sequence_SBK.is_floating_point(), sequence_SBK.size(-1)
        belongs = sequence_SBK.flatten(0, 1) if shared else sequence_SBK[..., 0].flatten()
        counts_KE = count_choices(chosen_TE, belongs, num_sequences)
        if self._mesh.layout.tp * self._mesh.layout.cp > 1:
            dist.all_reduce(counts_KE, group=self._mesh.groups.tp_cp)
        scores_TE = logits_TE.float().softmax(-1)
        part = sequence_balance(scores_TE, counts_KE, belongs, self._arch.experts_per_token) * self._share
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
