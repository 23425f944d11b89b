"""Stand-ins for TransformerEngine's layers: what they keep for the backward, what they allocate, and their messages.

TransformerEngine cannot be imported without CUDA. The stand-ins make the same products and messages in the same order,
and keep the tensors of the table in tests/rehearsal/saved_tensors.py, which has the sources. They hold the parameters
of the modules of our local layer spec under the same names. They compute no numbers: they are for a rehearsed device
only.

Legend: S sequence (a shard of it under sequence parallelism), B batch, R rows of a product (tokens), H input width, O
output width; T tokens of a packed row, S' and T' this rank's of them under context parallelism, N query heads and G
key-value groups of this rank, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarlhf.models.attention.layers import CausalAttention, open_packed_row
from megarlhf.models.attention.packed import packed_attention
from megarlhf.models.lora import move_adapter
from megarlhf.rehearsal.fake_device.fused import add_product, pass_over
from megarlhf.rehearsal.fake_device.torch_patches import storage_key, varlen_attn, varlen_attn_backward
from megarlhf.rehearsal.transformer_engine.ring import ring_attention

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
CUBLAS_WORKSPACE = 32 * 2**20 + 1024
"""Bytes from Hopper on; 4 MiB before (cpp_extensions/gemm.py:31)."""


class Shared:
    """State that all layers of a process share."""

    def __init__(self, device: torch.device, named: Callable[[Iterable[Tensor], str], None]) -> None:
        """`name` tells the use of memory that is no activation."""
        self._device, self._named = device, named
        self._workspace: Tensor | None = None
        self._dummies: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def product(self, left_RI: Tensor, right_IO: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """[R, I] x [I, O] -> [R, O]; a bias is added inside the product."""
        self._hold_workspace()
        return torch.mm(left_RI, right_IO) if bias_O is None else torch.addmm(bias_O, left_RI, right_IO)

    def add_weight_gradient(self, weight_OI: Tensor, grad_RO: Tensor, input_RI: Tensor) -> Tensor:
        """Add a gradient to Megatron's `main_grad` inside the product. Autograd gets a tensor that nobody reads."""
        self._hold_workspace()
        add_product(weight_OI.main_grad, grad_RO.t(), input_RI)  # type: ignore[attr-defined]
        weight_OI.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        key = weight_OI.shape, weight_OI.dtype
        if key not in self._dummies:
            self._dummies[key] = torch.empty(weight_OI.shape, dtype=weight_OI.dtype, device=self._device)
            self._named([self._dummies[key]], "gradients")
        return self._dummies[key].detach()

    def _hold_workspace(self) -> None:
        if self._workspace is None:
            self._workspace = torch.empty(CUBLAS_WORKSPACE, dtype=torch.uint8, device=self._device)
            self._named([self._workspace], "kernels' work space")


# --- norms ----------------------------------------------------------------------------------------


def _normalised(input_RH: Tensor, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The norm's output, and 1 / deviation of each row in fp32; for a norm with a bias, the mean too."""
    output_RH = torch.empty_like(input_RH)
    statistics = [torch.empty(input_RH.size(0), dtype=torch.float32, device=input_RH.device) for _ in parameters]
    pass_over([input_RH, *parameters], [output_RH, *statistics])
    return output_RH, statistics


def _normalised_backward(
    grad_RH: Tensor, input_RH: Tensor, statistics: list[Tensor], parameters: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    to_input_RH = torch.empty_like(input_RH)
    to_parameters = [torch.empty_like(parameter) for parameter in parameters]
    pass_over([grad_RH, input_RH, *statistics, *parameters], [to_input_RH, *to_parameters])
    return to_input_RH, to_parameters


class Norm(nn.Module):
    """TENorm: a norm that stands alone."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        for name, parameter in norm.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, input_SBH: Tensor) -> Tensor:
        return _Norm.apply(input_SBH, *self.parameters())


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_SBH: Tensor, *parameters: Tensor) -> Tensor:
        input_RH = input_SBH.contiguous().view(-1, input_SBH.size(-1))
        output_RH, statistics = _normalised(input_RH, [*parameters])
        ctx.save_for_backward(input_RH, *statistics)
        ctx.parameters = parameters
        return output_RH.view(input_SBH.shape)

    @staticmethod
    def backward(ctx: Any, grad_SBH: Tensor) -> Any:
        input_RH, *statistics = ctx.saved_tensors
        grad_RH = grad_SBH.contiguous().view(input_RH.shape)
        to_input_RH, to_parameters = _normalised_backward(grad_RH, input_RH, statistics, [*ctx.parameters])
        return to_input_RH.view(grad_SBH.shape), *to_parameters


class FoldedNorm(nn.Module):
    """Place of a norm that is part of the linear layer behind it. It holds the norm's parameters, under their names."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        for name, parameter in norm.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, input_SBH: Tensor) -> Tensor:
        return input_SBH


# --- linear layers --------------------------------------------------------------------------------


class Linear(nn.Module):
    """TEColumnParallelLinear or TERowParallelLinear in place of Megatron-Core's own layer of the same place."""

    def __init__(self, linear: Any, shared: Shared, *, by_rows: bool) -> None:
        """`by_rows`: whether the weight is split by the input's width, as in RowParallelLinear. An expert's messages
        are the dispatcher's."""
        super().__init__()
        self.weight, self.bias, self.skip_bias_add = linear.weight, linear.bias, linear.skip_bias_add
        self.shared, self.by_rows, self.group = shared, by_rows, linear.tp_group
        self.cut = not linear.explicit_expert_comm and linear.tp_group.size() > 1
        self.sequence_parallel = self.cut and linear.sequence_parallel
        move_adapter(linear, self)

    def forward(self, input_SBI: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.skip_bias_add or self.bias is None:
            return _Linear.apply(input_SBI, self.weight, None, self), self.bias
        return _Linear.apply(input_SBI, self.weight, self.bias, self), None

    def gathered(self, input_RI: Tensor, *, wait: bool = True) -> tuple[Tensor, Any]:
        """All ranks' rows under sequence parallelism, and a handle to wait for."""
        if not self.sequence_parallel:
            return input_RI, None
        whole_RI = input_RI.new_empty(input_RI.size(0) * self.group.size(), *input_RI.shape[1:])
        work = dist.all_gather_into_tensor(whole_RI, input_RI.contiguous(), group=self.group, async_op=not wait)
        return whole_RI, work

    def summed(self, input_RI: Tensor, *, wait: bool = True) -> tuple[Tensor, Any]:
        """Sum over the ranks between which a product is split, and a handle; under sequence parallelism only this
        rank's rows."""
        if not self.cut:
            return input_RI, None
        if not self.sequence_parallel:
            return input_RI, dist.all_reduce(input_RI, group=self.group, async_op=not wait)
        rows_RI = input_RI.new_empty(input_RI.size(0) // self.group.size(), *input_RI.shape[1:])
        return rows_RI, dist.reduce_scatter_tensor(rows_RI, input_RI, group=self.group, async_op=not wait)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


class _Linear(torch.autograd.Function):
    """transformer_engine/pytorch/module/linear.py, _Linear"""

    @staticmethod
    def forward(ctx: Any, input_SBI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, layer: Linear) -> Tensor:
        ctx.layer, ctx.shape, ctx.adds_bias = layer, input_SBI.shape, bias_O is not None
        input_RI = input_SBI.reshape(-1, input_SBI.size(-1))
        ctx.save_for_backward(input_RI if weight_OI.requires_grad else None)
        whole_RI = input_RI if layer.by_rows else layer.gathered(input_RI)[0]
        product_RO = layer.shared.product(whole_RI, weight_OI.t(), bias_O)
        del whole_RI
        output_RO = layer.summed(product_RO)[0] if layer.by_rows else product_RO
        return output_RO.view(-1, *input_SBI.shape[1:-1], output_RO.size(-1))

    @staticmethod
    def backward(ctx: Any, grad_SBO: Tensor) -> Any:
        layer, (input_RI,) = ctx.layer, ctx.saved_tensors
        grad_RO = grad_SBO.reshape(-1, grad_SBO.size(-1)).contiguous()
        gathering = reducing = to_input_RI = to_weight = to_bias = None
        if layer.by_rows:
            grad_RO, _ = layer.gathered(grad_RO)
        elif input_RI is not None:
            input_RI, gathering = layer.gathered(input_RI, wait=False)
        if ctx.needs_input_grad[0]:
            to_input_RI = product_RI = layer.shared.product(grad_RO, layer.weight)  # kept to the end, as theirs is
            if not layer.by_rows:
                to_input_RI, reducing = layer.summed(product_RI, wait=False)
        if input_RI is not None:
            _wait(gathering)
            to_weight = layer.shared.add_weight_gradient(layer.weight, grad_RO, input_RI)
            to_bias = torch.empty_like(layer.bias) if ctx.adds_bias else None
        _wait(reducing)
        return None if to_input_RI is None else to_input_RI.view(ctx.shape), to_weight, to_bias, None


class NormLinear(Linear):
    """TELayerNormColumnParallelLinear. The norm's parameters stay with a `FoldedNorm`."""

    def __init__(self, norm: nn.Module, linear: Any, shared: Shared) -> None:
        super().__init__(linear, shared, by_rows=False)
        self.scale_and_shift = tuple(norm.parameters())  # a tuple: not registered a second time
        self.eps, self.normalization = 1e-5, "RMSNorm" if len(self.scale_and_shift) == 1 else "LayerNorm"

    @property
    def layer_norm_weight(self) -> Tensor:
        """Norm's weight under TransformerEngine's name, for an adapter."""
        return self.scale_and_shift[0]

    @property
    def layer_norm_bias(self) -> Tensor:
        return self.scale_and_shift[1]

    def forward(self, input_SBI: Tensor) -> tuple[Tensor, Tensor | None]:
        bias, returned = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        return _NormLinear.apply(input_SBI, self.weight, bias, self, *self.scale_and_shift), returned


class _NormLinear(torch.autograd.Function):
    """transformer_engine/pytorch/module/layernorm_linear.py, _LayerNormLinear"""

    @staticmethod
    def forward(
        ctx: Any, input_SBH: Tensor, weight_OH: Tensor, bias_O: Tensor | None, layer: NormLinear, *parameters: Tensor
    ) -> Tensor:
        ctx.layer, ctx.shape, ctx.adds_bias = layer, input_SBH.shape, bias_O is not None
        input_RH = input_SBH.reshape(-1, input_SBH.size(-1))
        normed_RH, statistics = _normalised(input_RH, [*parameters])
        whole_RH, _ = layer.gathered(normed_RH)
        output_RO = layer.shared.product(whole_RH, weight_OH.t(), bias_O)
        del whole_RH
        ctx.save_for_backward(input_RH, *statistics)
        # Not saved: they free it in the middle of the backward.
        ctx.normed_RH = normed_RH if weight_OH.requires_grad else None
        return output_RO.view(-1, *input_SBH.shape[1:-1], output_RO.size(-1))

    @staticmethod
    def backward(ctx: Any, grad_SBO: Tensor) -> Any:
        layer, (input_RH, *statistics) = ctx.layer, ctx.saved_tensors
        normed_RH, ctx.normed_RH = ctx.normed_RH, None
        grad_RO = grad_SBO.reshape(-1, grad_SBO.size(-1)).contiguous()
        gathering = to_weight = to_bias = None
        if normed_RH is not None:
            normed_RH, gathering = layer.gathered(normed_RH, wait=False)
        product_RH = layer.shared.product(grad_RO, layer.weight)
        to_normed_RH, reducing = layer.summed(product_RH, wait=False)
        if normed_RH is not None:
            _wait(gathering)
            to_weight = layer.shared.add_weight_gradient(layer.weight, grad_RO, normed_RH)
            to_bias = torch.empty_like(layer.bias) if ctx.adds_bias else None
            del normed_RH
        _wait(reducing)
        to_input_RH, to_parameters = _normalised_backward(to_normed_RH, input_RH, statistics, [*layer.scale_and_shift])
        return to_input_RH.view(ctx.shape), to_weight, to_bias, None, *to_parameters


# --- attention and the gate -----------------------------------------------------------------------


class Attention(nn.Module):
    """TEDotProductAttention with cuDNN's kernels, which it prefers on Hopper and later, in place of CausalAttention.

    Under context parallelism it uses its ring of ranks (`transformer_engine/ring.py`), or our own code if there is a
    window.
    """

    def __init__(self, core: CausalAttention) -> None:
        super().__init__()
        self.core = core
        self.scale, self.window, self.cp_group = core.softmax_scale, core.window, core.cp_group
        self.own_way = core.cp_group is not None and core.window is not None

    def forward(
        self,
        query_SBND: Tensor,
        key_SBGD: Tensor,
        value_SBGD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        **named: Any,
    ) -> Tensor:
        """[S', B, N, D], [S', B, G, D] twice -> [S', B, N x D]; of a packed row S' = T' and B = 1."""
        if packed_seq_params is not None:
            row, query, key, value = open_packed_row(packed_seq_params, query_SBND, key_SBGD, value_SBGD)
            # As `models/attention/layers.py` does beside TransformerEngine.
            if query.dtype not in SIXTEEN_BITS or self.own_way or row.has_trees:
                context = packed_attention(query, key, value, row, scale=self.scale, window=self.window)
            else:
                context = self._fused(query, key, value, row.cu_seqlens_q, row.max_seqlen_q)
            return context.reshape(row.num_local_tokens, 1, -1)
        if query_SBND.dtype not in SIXTEEN_BITS or self.own_way:
            context_SBX: Tensor = self.core(query_SBND, key_SBGD, value_SBGD, attention_mask, **named)
            return context_SBX
        length, rows = query_SBND.shape[:2]
        query, key, value = (x.flatten(0, 1) for x in (query_SBND, key_SBGD, value_SBGD))
        whole = length if self.cp_group is None else length * self.cp_group.size()
        starts = torch.arange(0, (rows + 1) * whole, whole, dtype=torch.int32, device=query.device)
        return self._fused(query, key, value, starts, whole, padded=True).view(length, rows, -1)

    def _fused(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, *, padded: bool = False
    ) -> Tensor:
        """Call the kernel. It needs contiguous query, key and value, or all three interleaved in one storage, as a
        projection leaves them unless something rearranges them."""
        if self.cp_group is not None:
            inputs = (query.contiguous(), key, value)
            return ring_attention(*inputs, cu_seqlens, longest, self.cp_group, scale=self.scale, padded=padded)
        together = len({storage_key(x) for x in (query, key, value)}) == 1 and query.shape == key.shape
        if not together:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        window = [-1 if self.window is None else self.window - 1, 0]
        return _FusedAttention.apply(query, key, value, cu_seqlens, longest, self.scale, window)


class _FusedAttention(torch.autograd.Function):
    """transformer_engine/pytorch/attention/dot_product_attention/backends.py, FusedAttnFunc.

    The operations are torch's, whose work the meter knows. Output, statistics and state of the generator have the same
    sizes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        scale: float | None,
        window: list[int],
    ) -> Tensor:
        grouped = query.size(1) != key.size(1)
        ctx.how = longest, window == [-1, 0], scale, window
        output, statistics, state = varlen_attn(
            *(query, key, value, cu_seqlens, cu_seqlens, longest, longest, ctx.how[1], scale, window, grouped)
        )
        ctx.save_for_backward(query, key, value, output, statistics, state, cu_seqlens)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, output, statistics, state, cu_seqlens = ctx.saved_tensors
        longest, causal, scale, window = ctx.how
        gradients = varlen_attn_backward(
            *(grad.contiguous(), query, key, value, output, statistics, cu_seqlens, cu_seqlens),
            *(longest, longest, causal, state, scale, window),
        )
        return *gradients, None, None, None, None


class Gate(nn.Module):
    """silu(gate) x up as Megatron-Core fuses it (megatron/core/fusions/fused_bias_swiglu.py), and for an expert x the
    weights of its tokens. It is one kernel forward and one backward; the first product is kept in between."""

    def forward(self, x_TF: Tensor, weights_T1: Tensor | None = None) -> Tensor:
        """[..., 2 F] -> [..., F]"""
        return _Gate.apply(x_TF, *(() if weights_T1 is None else (weights_T1,)))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        x_TF = inputs[0]
        out_TF = x_TF.new_empty((*x_TF.shape[:-1], x_TF.size(-1) // 2))
        pass_over([*inputs], [out_TF])
        return out_TF

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        to_inputs = [torch.empty_like(x) for x in ctx.saved_tensors]
        pass_over([*gradients, *ctx.saved_tensors], to_inputs)
        return tuple(to_inputs)
