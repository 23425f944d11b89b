"""Low-rank adapters on Megatron-Core's linear layers, whatever spec they are of.

A linear layer gets a module `lora` with the parameters A and B and a hook on its forward, which adds scale x B (A x) to
what the layer returns. Where they stand on each rank: `architectures/adapters.py`.

Between A and B stand `rank` channels a token, so everything that tensor-parallel ranks have to tell each other is told
there. A column-parallel layer has all of A and some rows of B: each rank makes A x of the tokens that it holds; under
sequence parallelism these are then gathered. A row-parallel layer has some columns of A and all of B: A x is summed,
and under sequence parallelism scattered. A parameter that is whole on each rank, and that each has multiplied with its
own tokens only, has its gradient summed over the ranks by Megatron-Core, as a norm's.

Experts get the tokens of all tensor-parallel ranks from the dispatcher, which also sums what the ranks' parts of an
expert return. What is between them is linear, so nothing is said in the middle, and gradients of what is whole are
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
    """How the ranks of a tensor-parallel group share a linear layer."""

    kind: Literal["column", "row"]
    group: dist.ProcessGroup | None
    """None: one rank, or an expert, whose dispatcher speaks to the others."""
    sequence_parallel: bool


class LowRank(nn.Module):
    """A and B of the adapters in one linear layer."""

    rows: Tensor | None

    def __init__(
        self, a: nn.Parameter, b: nn.Parameter, scale: float, sharing: LinearSharding, rows: Tensor | None
    ) -> None:
        """`rows`: [O, N], 1 where a row of B belongs to an adapter, of which there are several or which has not all
        rows; None: one, and all rows are its."""
        super().__init__()
        self.A, self.B = a, b
        self.scale, self.sharing = scale, sharing
        self.enabled = True
        self.register_buffer("rows", rows, persistent=False)

    def matrix(self) -> Tensor:
        """B as [O, N x r]: zero where a row belongs to another adapter than a column."""
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
        """A new W + scale x B A, summed in fp32 and rounded once."""
        delta_OI = self.matrix().float() @ self.A.float()
        return delta_OI.mul_(self.scale).add_(weight_OI.detach().float()).to(weight_OI.dtype)


class GroupedLowRank(nn.ModuleList):
    """The adapters of a rank's experts where one layer computes all of them."""

    def forward(self, x_RI: Tensor, out_RO: Tensor, sizes: Sequence[int]) -> Tensor:
        """`sizes`: rows of each expert, one after the other."""
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
    """Give the linear layers of a rank's model the adapters that stand in its `placements`, unset.

    tp_group: None for one rank; experts_are_shared: over expert-parallel ranks
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
        # The whole one of the two, of which each rank has seen its own tokens, or its own part of an expert.
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
    """Give a layer that takes another's place its adapter, if that has one."""
    adapter = getattr(layer, "lora", None)
    if adapter is not None:
        into.add_module("lora", adapter)
        into.register_forward_hook(_add_grouped if isinstance(adapter, GroupedLowRank) else _add)


def _rows(placed: Sequence[Placement], order: Sequence[str], shape: Sequence[int], like: Tensor) -> Tensor | None:
    """[O, N]: which rows of B belong to which adapter."""
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
    """What the layer's matrix is multiplied with: TransformerEngine's layers may have the norm before it inside."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return x
    eps = float(layer.eps)  # type: ignore[arg-type]
    if layer.normalization == "RMSNorm":
        return nn.functional.rms_norm(x, weight.shape, weight, eps)
    return nn.functional.layer_norm(x, weight.shape, weight, layer.layer_norm_bias, eps)  # type: ignore[arg-type]


def adapters_in(module: nn.Module) -> dict[str, LowRank]:
    """By the name of the weight that each adds to."""
    found = {}
    for name, inside in module.named_modules():
        if isinstance(inside, LowRank):
            path, _, expert = f"{name}.".partition(LIVE)
            found[f"{path}.weight{expert.rstrip('.')}"] = inside
    return found


@contextlib.contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Inside, the model is its base."""
    adapters = adapters_in(module).values()
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def merged_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the model that base and adapter are together: those that an adapter adds to as new tensors,
    the others as they are."""
    merged = {name: tensor for name, tensor in parameters.items() if LIVE not in name}
    for name, adapter in adapters_in(module).items():
        merged[name] = adapter.merged(merged[name])
    return merged


def scaled_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters with scale x B, in fp32 and rounded once, for every B."""
    scaled = dict(parameters)
    for name, inside in module.named_modules():
        if isinstance(inside, LowRank):
            b = inside.B.detach()
            scaled[f"{name}.B"] = (b.float() * inside.scale).to(b.dtype)
    return scaled
