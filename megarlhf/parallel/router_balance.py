"""Load-balancing loss of a role's experts over micro-batches, ranks and pipeline stages.

The loss is computed by the routers, on every pipeline stage, and does not travel with the main loss. A sequence lies
within one micro-batch, and on the ranks of one tensor- and context-parallel group. The numbers of layers and of
sequences in the mini-batch are known before the first forward. So a layer's part of the loss is complete when the layer
has run, and its gradient can start there.

Legend: B rows and S columns of a micro-batch's grid, S' columns of this rank, K sequences of the micro-batch, T tokens
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
"""Name of the loss among the sums of a mini-batch."""


class RouterBalance:
    """Load-balancing loss of a role: `coefficient` x the mean of `algo.balance.sequence_balance` over layers and over
    the mini-batch's sequences."""

    def __init__(self, coefficient: float, arch: Architecture, mesh: Mesh) -> None:
        self.coefficient = coefficient
        self._arch, self._mesh = arch, mesh
        device = mesh.runtime.device
        self._share = torch.zeros((), device=device)
        """Weight of one layer and one sequence in the mean."""
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        """This rank's part of the mean since `begin`. The sum over all ranks is the mean."""
        self.scale: Callable[[Tensor], Tensor] = lambda loss: loss
        """Scaling of the main loss before its backward."""

    def begin(self, layouts: Sequence[MicroBatchLayout | None]) -> None:
        """Start a mini-batch, given this data-parallel rank's micro-batches. Call it before the first forward.
        Collective."""
        known = [layout for layout in layouts if layout is not None]
        assert len(known) == len(layouts), "the load-balancing loss needs micro-batches with a layout"
        num_sequences = torch.tensor(float(sum(len(layout.sequences) for layout in known)), device=self.total.device)
        if self._mesh.layout.dp > 1:
            dist.all_reduce(num_sequences, group=self._mesh.groups.dp)
        self._share = 1.0 / (self._arch.num_layers * num_sequences)
        self.total.zero_()

    def sequences(
        self, layout: MicroBatchLayout | None, share: ContextShare | None, device: torch.device
    ) -> Tensor | None:
        """The sequence of each token that this rank routes. None where K = 0.

        Returns: [S', B, K] int64: the index of the token's sequence, K for padding. The last axis repeats the index and
            takes no memory; it tells K, since Megatron-Core passes a tensor through its layers and no number beside it.
            Where sequences share tokens: [S', B, K] fp32, 1 where a token belongs to a sequence.
        """
        if layout is None or not layout.sequences:
            return None
        num_sequences, tp = len(layout.sequences), self._mesh.layout.tp
        sequence_R = torch.arange(num_sequences).repeat_interleave(torch.tensor(layout.lengths, dtype=torch.int64))
        if layout.segments:
            belongs_SK = torch.zeros(layout.columns, num_sequences)
            belongs_SK[layout.tokens_R, sequence_R] = 1.0
            return belongs_SK.chunk(tp)[self._mesh.coordinates.tp if tp > 1 else 0].unsqueeze(1).to(device)
        sequence_X = torch.full((layout.rows * layout.columns,), num_sequences, dtype=torch.int64)
        sequence_X[layout.tokens_R] = sequence_R
        sequence_BS = sequence_X.view(layout.rows, layout.columns).to(device)
        if share is not None:
            sequence_BS = share.cut(sequence_BS)
        if tp > 1:  # experts use sequence parallelism: a rank routes a part of the columns
            sequence_BS = sequence_BS.chunk(tp, 1)[self._mesh.coordinates.tp]
        return sequence_BS.T.contiguous().unsqueeze(-1).expand(-1, -1, num_sequences)

    def added(self, probs_TE: Tensor, logits_TE: Tensor, chosen_TE: Tensor, sequence_SBK: Tensor) -> Tensor:
        """Add a layer's part of the loss. Returns `probs_TE` unchanged; their backward also starts the loss's backward.

        Shapes: probs_TE, logits_TE [T, E] fp32, chosen_TE [T, E] bool, sequence_SBK as `sequences` returns it
        """
        shared, num_sequences = sequence_SBK.is_floating_point(), sequence_SBK.size(-1)
        belongs = sequence_SBK.flatten(0, 1) if shared else sequence_SBK[..., 0].flatten()
        counts_KE = count_choices(chosen_TE, belongs, num_sequences)
        if self._mesh.layout.tp * self._mesh.layout.cp > 1:
            dist.all_reduce(counts_KE, group=self._mesh.groups.tp_cp)
        scores_TE = logits_TE.float().softmax(-1)
        layer_loss = sequence_balance(scores_TE, counts_KE, belongs, self._arch.experts_per_token) * self._share
        self.total += layer_loss.detach()
        with_loss: Tensor = _AttachLoss.apply(probs_TE, layer_loss * self.coefficient, self.scale)
        return with_loss


class _AttachLoss(torch.autograd.Function):
    """Returns the tensor unchanged. The backward of an auxiliary loss begins when the tensor's backward does.

    Megatron-Core's counterpart keeps the scale of the main loss in a class attribute, for all models of a process.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, scale: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return gradients[0], ctx.scale(torch.ones((), dtype=dtype, device=device)), None
