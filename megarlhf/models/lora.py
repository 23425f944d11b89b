"""Low-rank adapters (LoRA) on Megatron-Core's linear layers, for either layer spec.

A linear layer gets a module `lora` with the parameters A and B, and a forward hook that adds scale x B (A x) to the
layer's output. The sharding of A and B: `architectures/adapters.py`.

A x has only `rank` channels per token, so tensor-parallel ranks communicate there:

- column-parallel layer: all of A, some rows of B. Each rank computes A x for its tokens; under sequence parallelism the
  results are then gathered.
- row-parallel layer: some columns of A, all of B. A x is summed over ranks; under sequence parallelism it is scattered.

The parameter that is whole on each rank has seen only that rank's tokens, so Megatron-Core sums its gradient over the
ranks, as for a norm.

Experts get the tokens of all tensor-parallel ranks from the dispatcher, which also sums the outputs of an expert's
parts. Everything in between is linear, so no communication is needed at A x, and gradients of whole parameters are
sums.

Legend: S sequence, B batch, R rows of tokens, I input, O output, N x r the ranks of the N adapters in one layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from megarlhf.architectures.adapters import LIVE, A, B
from megarlhf.placement import Placement, RankPlacements

_COLUMN = ("linear_qkv", "linear_fc1")
_EXPERTS = ".experts."


@dataclass(frozen=True)
class LinearSharding:
    """Sharding of a linear layer over a tensor-parallel group."""

    kind: Literal["column", "row"]
    group: dist.ProcessGroup | None
    """Tensor-parallel group. None for a single rank, and for experts, whose dispatcher communicates."""
    sequence_parallel: bool


class LowRank(nn.Module):
    """The matrices A and B of the adapters in one linear layer."""

    rows: Tensor | None

    def __init__(
        self, a: nn.Parameter, b: nn.Parameter, scale: float, sharing: LinearSharding, rows: Tensor | None
    ) -> None:
        """`rows`: [O, N], 1 where a row of B belongs to an adapter. None: there is one adapter, and it has all rows."""
        super().__init__()
        self.A, self.B = a, b
        self.scale, self.sharing = scale, sharing
        self.enabled = True
        self.register_buffer("rows", rows, persistent=False)

    def matrix(self) -> Tensor:
        """B as [O, N x r], zero where row and column belong to different adapters."""
        if self.rows is None:
            return self.B
        return (self.rows.unsqueeze(-1) * self.B.unsqueeze(1)).flatten(1)

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """[..., I], [..., O] -> [..., O]."""
        h = nn.functional.linear(x, self.A)
        group, sequence_parallel = self.sharing.group, self.sharing.sequence_parallel
        if group is not None and self.sharing.kind == "column":
            if sequence_parallel:
                h = gather_from_sequence_parallel_region(h, tensor_parallel_output_grad=True, group=group)
            else:
                h = copy_to_tensor_model_parallel_region(h, group=group)
        elif group is not None:
            if sequence_parallel:
                h = reduce_scatter_to_sequence_parallel_region(h, group=group)
            else:
                h = reduce_from_tensor_model_parallel_region(h, group=group)
        h_RN = h.reshape(-1, h.size(-1))
        return torch.addmm(out.reshape(-1, out.size(-1)), h_RN, self.matrix().t(), alpha=self.scale).view(out.shape)

    @torch.no_grad()
    def merged(self, weight_OI: Tensor) -> Tensor:
        """W + scale x B A as a new tensor, summed in fp32 and rounded once."""
        delta_OI = self.matrix().float() @ self.A.float()
        return delta_OI.mul_(self.scale).add_(weight_OI.detach().float()).to(weight_OI.dtype)


class GroupedLowRank(nn.ModuleList):
    """Adapters of a rank's experts, where one layer computes all experts."""

    def forward(self, x_RI: Tensor, out_RO: Tensor, sizes: Sequence[int]) -> Tensor:
        """[R, I], [R, O] -> [R, O]. `sizes`: number of rows of each expert, in their order."""
        parts = zip(self, x_RI.split(list(sizes)), out_RO.split(list(sizes)), strict=True)
        return torch.cat([adapter(x, out) for adapter, x, out in parts])


def attach_adapters(
    module: nn.Module,
    placements: RankPlacements,
    *,
    scale: float,
    tp_group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    experts_are_shared: bool,
) -> None:
    """Give the linear layers of a rank's model the adapters listed in `placements`. Their weights are not set yet.

    tp_group: None for one rank
    experts_are_shared: experts are distributed over expert-parallel ranks
    """
    by_storage = placements.by_storage()
    for name, shape in placements.storages.items():
        path, live, rest = name.partition(LIVE)
        if not live or not rest.endswith("A"):
            continue
        layer = module.get_submodule(path)
        name_b = name[:-1] + "B"
        of_expert = _EXPERTS in path
        kind: Literal["column", "row"] = "column" if path.endswith(_COLUMN) else "row"
        reference = next(layer.parameters(recurse=False))
        a, b = (
            nn.Parameter(torch.empty(size, dtype=reference.dtype, device=reference.device))
            for size in (shape, placements.storages[name_b])
        )
        stacked = sorted(by_storage[name], key=lambda placement: placement.offset)
        order = [placement.tensor.removesuffix(A) + B for placement in stacked]
        rows = _rows(by_storage[name_b], order, placements.storages[name_b], reference)
        sharing = LinearSharding(kind, None if of_expert else tp_group, sequence_parallel)
        # The unsharded one of the two. Each rank has seen its own tokens, or its own part of an expert.
        whole = a if kind == "column" else b
        if tp_group is not None and (sequence_parallel or of_expert):
            whole.sequence_parallel = True  # type: ignore[attr-defined]
        for parameter in (a, b):
            parameter.allreduce = not (of_expert and experts_are_shared)  # type: ignore[attr-defined]
        adapter = LowRank(a, b, scale, sharing, rows)
        if rest == "A":
            layer.add_module("lora", adapter)
            layer.register_forward_hook(_add)
        else:
            if not hasattr(layer, "lora"):
                layer.add_module("lora", GroupedLowRank())
                layer.register_forward_hook(_add_grouped)
            adapters = layer.lora
            assert isinstance(adapters, GroupedLowRank)
            adapters.append(adapter)


def move_adapter(layer: nn.Module, into: nn.Module) -> None:
    """Move the adapter of `layer`, if it has one, to the layer that replaces it."""
    adapter = getattr(layer, "lora", None)
    if adapter is not None:
        into.add_module("lora", adapter)
        into.register_forward_hook(_add_grouped if isinstance(adapter, GroupedLowRank) else _add)


def _rows(placed: Sequence[Placement], order: Sequence[str], shape: Sequence[int], like: Tensor) -> Tensor | None:
    """[O, N]: 1 where a row of B belongs to an adapter; see `LowRank`."""
    rows = torch.zeros(shape[0], len(order), dtype=like.dtype)
    for placement in placed:
        first = placement.offset // shape[1]
        rows[first : first + placement.box.shape[0], order.index(placement.tensor)] = 1
    return None if len(order) == 1 and bool(rows.all()) else rows.to(like.device)


def _add(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    adapter = layer.lora
    assert isinstance(adapter, LowRank)
    if not adapter.enabled:
        return output
    out, bias = output
    return adapter(_normed(layer, inputs[0]), out), bias


def _add_grouped(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    adapters = layer.lora
    assert isinstance(adapters, GroupedLowRank)
    if not all(adapter.enabled for adapter in adapters):
        return output
    out, bias = output
    return adapters(inputs[0], out, inputs[1]), bias


def _normed(layer: nn.Module, x: Tensor) -> Tensor:
    """Input of the layer's matrix product. TransformerEngine's layers may apply the preceding norm themselves."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return x
    eps = float(layer.eps)  # type: ignore[arg-type]
    if layer.normalization == "RMSNorm":
        return nn.functional.rms_norm(x, weight.shape, weight, eps)
    return nn.functional.layer_norm(x, weight.shape, weight, layer.layer_norm_bias, eps)  # type: ignore[arg-type]


def adapters_in(module: nn.Module) -> dict[str, LowRank]:
    """Adapters by the name of the weight that each is added to."""
    adapters = {}
    for name, submodule in module.named_modules():
        if isinstance(submodule, LowRank):
            path, _, expert = f"{name}.".partition(LIVE)
            adapters[f"{path}.weight{expert.rstrip('.')}"] = submodule
    return adapters


@contextlib.contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Scope in which the model computes without its adapters."""
    adapters = adapters_in(module).values()
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def merged_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of the model with its adapters merged. Weights with an adapter are new tensors."""
    merged = {name: tensor for name, tensor in parameters.items() if LIVE not in name}
    for name, adapter in adapters_in(module).items():
        merged[name] = adapter.merged(merged[name])
    return merged


def scaled_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters with scale x B, computed in fp32 and rounded once, in place of every B."""
    scaled = dict(parameters)
    for name, submodule in module.named_modules():
        if isinstance(submodule, LowRank):
            b = submodule.B.detach()
            scaled[f"{name}.B"] = (b.float() * submodule.scale).to(b.dtype)
    return scaled
