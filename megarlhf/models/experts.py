"""Mixture of experts: the router, and the exchange of tokens between the ranks of the experts.

Legend: S sequence (a shard of it under sequence parallelism), B batch, H hidden, E experts, T tokens that a rank's
experts get (a token counts once for each of its experts there).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megarlhf.parallel.router_balance import RouterBalance


class ExpertsLayer(TransformerLayer):
    """Megatron-Core's layer; in training it also gets the sequence of each token (`RouterBalance.sequences`).

    The sequences arrive as `attention_mask`, which is not needed since attention is always causal here. This argument
    reaches a layer unchanged on every pipeline stage, and again when the layer is recomputed. Upstream's `padding_mask`
    does not: it is made boolean, and cut on the first stage only.
    """

    def forward(self, *args: Any, attention_mask: Tensor | None = None, **named: Any) -> Any:
        self.mlp.router.sequence_SBK = attention_mask
        try:
            return super().forward(*args, attention_mask=None, **named)
        finally:
            self.mlp.router.sequence_SBK = None


class Router(TopKRouter):
    """Megatron-Core's choice of experts, on fp32 logits, with our load-balancing loss in training.

    Upstream's `gating` calls transformer-engine's matrix product and fails where that is not installed (0.16.1 leaves
    the name `te_general_gemm` undefined).
    """

    balance: RouterBalance | None = None
    sequence_SBK: Tensor | None = None

    def gating(self, hidden_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, E] fp32."""
        return nn.functional.linear(hidden_SBH.float(), self.weight.float())

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[S, B, E] -> weights of each token's experts (0 for others), and which experts are chosen: [S x B, E]
        each."""
        probs_TE, chosen_TE = super().routing(logits, padding_mask)
        # The first forward of a recomputed layer has no gradients, and must not count.
        if self.balance is not None and self.sequence_SBK is not None and torch.is_grad_enabled():
            logits_TE = logits.view(-1, logits.size(-1))
            probs_TE = self.balance.added(probs_TE, logits_TE, chosen_TE, self.sequence_SBK)
        return probs_TE, chosen_TE


class Exchange(MoEAlltoAllTokenDispatcher):
    """Megatron-Core's exchange of tokens between the ranks of their experts, on any device.

    Each tensor-parallel rank holds a part of every expert, and the ranks have different numbers of tokens for them.
    gloo cannot gather different numbers: here these tokens go by `all_to_all`, as the others do. Shared experts and
    dropped tokens are not supported, since none of our architectures has them.

    The routing is released once tokens are back; upstream keeps it until the next forward. The experts' weights are
    part of the layer's graph: with a recomputed layer they would keep its input and the input's gradient alive.
    """

    output_splits_tp: Any
    tokens_per_expert: Any
    """Upstream's, from `preprocess`."""
    probs: Any
    routing_map: Any
    reversed_local_input_permutation_mapping: Any
    """Upstream's, from `dispatch_preprocess`."""

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [T, H] in the order of this rank's experts, the count for each expert, and the tokens' weights [T]."""
        tokens_TH, probs_T = global_input_tokens, global_probs
        if self.tp_size > 1:
            self._tp_sizes = [int(size) for size in self.output_splits_tp]
            tokens_TH = _AllTokens.apply(tokens_TH, self._tp_sizes, self.tp_group)
            probs_T = _AllTokens.apply(probs_T, self._tp_sizes, self.tp_group)
        counts = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        if self.num_local_experts > 1:
            tokens_TH, probs_T = sort_chunks_by_idxs(
                tokens_TH,
                self.num_global_tokens_per_local_expert.ravel(),
                self.sort_input_by_local_experts,
                probs=probs_T,
                fused=self.config.moe_permute_fusion,
            )
        counts = self._maybe_dtoh_and_synchronize("before_finish", counts)
        self.tokens_per_expert = None
        return tokens_TH, counts, probs_T

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Outputs of this rank's experts [T, H] -> outputs for its own tokens, summed over tensor-parallel ranks."""
        if self.num_local_experts > 1:
            hidden_states, _ = sort_chunks_by_idxs(
                hidden_states,
                self.num_global_tokens_per_local_expert.T.ravel(),
                self.restore_output_by_local_experts,
                fused=self.config.moe_permute_fusion,
            )
        if self.tp_size > 1:
            # Summed in the dtype of the experts' weights, fp32.
            in_fp32 = hidden_states.to(self.probs.dtype)
            hidden_states = _OwnSums.apply(in_fp32, self._tp_sizes, self.tp_group).to(hidden_states.dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Sum of each token's expert outputs, in the shape of the layer's input."""
        out = super().combine_postprocess(permutated_local_input_tokens)
        self.probs = self.routing_map = self.reversed_local_input_permutation_mapping = None
        return out


class _AllTokens(torch.autograd.Function):
    """All-gather of rows, rank after rank. Ranks may have different numbers of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _all_rows(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_sums(grad, ctx.sizes, ctx.group), None, None


class _OwnSums(torch.autograd.Function):
    """Reduce-scatter of rows: the sum over ranks of this rank's rows. Transpose of `_AllTokens`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _own_sums(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_rows(grad, ctx.sizes, ctx.group), None, None


def _all_rows(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    everywhere = x.repeat(group.size(), *[1] * (x.ndim - 1))
    out = x.new_empty(sum(sizes), *x.shape[1:])
    dist.all_to_all_single(out, everywhere, sizes, [len(x)] * group.size(), group=group)
    return out


def _own_sums(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    own = sizes[group.rank()]
    parts = x.new_empty(group.size() * own, *x.shape[1:])
    dist.all_to_all_single(parts, x.contiguous(), [own] * group.size(), sizes, group=group)
    return parts.view(group.size(), own, *x.shape[1:]).sum(0)


def use_exchange(module: nn.Module, groups: ProcessGroupCollection) -> None:
    """Put `Exchange` into every layer of experts. The layer spec cannot do it: a TransformerLayer accepts
    Megatron-Core's own MoELayer only, which makes its dispatcher itself."""
    for layer in module.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = Exchange(
                layer.num_local_experts, layer.local_expert_indices, config=layer.config, pg_collection=groups
            )


def use_balance(module: nn.Module, balance: RouterBalance) -> None:
    """Make the routers of a trained model add the load-balancing loss."""
    routers = [layer for layer in module.modules() if isinstance(layer, Router)]
    assert routers, "a model without experts has no routers to balance"
    for router in routers:
        router.balance = balance
