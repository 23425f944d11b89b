"""Weight gradients that a layer adds to `main_grad` by itself, as TransformerEngine's layers and apex's kernel do."""

from contextlib import ExitStack
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megarlhf.config import SFTConfig
from megarlhf.models.build import FUSED, fuse_weight_gradients
from megarlhf.models.role import build_role
from megarlhf.parallel.mesh import GroupCache
from megarlhf.runtime import Runtime


class _Linear(torch.autograd.Function):
    """What TransformerEngine 2.11 does with `fuse_wgrad_accumulation`: the product goes to `main_grad`, the parameter
    is marked, and autograd gets a gradient of that shape with nothing in it (here: a large number)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        product = grad.flatten(0, -2).float().T @ x.flatten(0, -2).float()
        ctx.layer.products.append(product)
        if not getattr(ctx.layer, FUSED):
            return grad @ weight, product.to(weight.dtype), None
        weight.main_grad.add_(product)
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, 1e9), None


def _forward(layer: Any, x: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
    return _Linear.apply(x, layer.weight, layer), None


def apex_gradients(runtime: Runtime, config: dict[str, Any]) -> list[tuple[float, float]]:
    """The same with Megatron-Core's own layers, and a stand-in for apex's kernel."""
    products: dict[int, list[Tensor]] = {}

    def add(input_RI: Tensor, grad_RO: Tensor, main_grad_OI: Tensor) -> None:
        product = grad_RO.float().T @ input_RI.float()
        products.setdefault(main_grad_OI.data_ptr(), []).append(product)
        main_grad_OI.add_(product)

    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=add)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(megatron_layers, "_grad_accum_fusion_available", True))
        stack.enter_context(mock.patch.object(megatron_layers, "fused_weight_gradient_mlp_cuda", kernel, create=True))
        return fused_gradients(runtime, config, products)


def fused_gradients(
    runtime: Runtime, config: dict[str, Any], fused: bool | dict[int, list[Tensor]]
) -> list[tuple[float, float]]:
    """By linear layer after one accumulation over several micro-batches: the largest gradient, and the largest
    difference between `main_grad` and the sum of the products in fp32. `fused`: whether TransformerEngine's kind adds
    them by itself; or, with Megatron-Core's own layers, where the products are by address of their buffer."""
    from megarlhf.trainers.supervised.sft import SupervisedFineTuning
    from tests.distributed import jobs

    cfg = SFTConfig.model_validate(config)
    role = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=1)
    layers: list[Any] = [
        layer for layer in role.shard.module.modules() if isinstance(layer, ColumnParallelLinear | RowParallelLinear)
    ]
    for layer in layers if isinstance(fused, bool) else ():
        setattr(layer, FUSED, False)
        layer.products, layer.forward = [], MethodType(_forward, layer)
    if fused is True:
        fuse_weight_gradients(role.shard.module)
    gradients: list[tuple[float, float]] = []

    def step() -> float:
        for layer in layers:
            if not isinstance(fused, bool):
                layer.products = fused[layer.weight.main_grad.data_ptr()]
            total = torch.stack(layer.products).sum(0)
            assert len(layer.products) == cfg.train.mini_batch_samples // (cfg.train.micro_batch_samples or 1) > 1
            gradients.append((float(total.abs().max()), float((layer.weight.main_grad - total).abs().max())))
        return 0.0

    assert role.trainer is not None
    role.trainer.gradient_norm = step  # type: ignore[method-assign]
    role.trainer.step = lambda norm: None  # type: ignore[method-assign]
    jobs.train_once(SupervisedFineTuning(cfg), role, jobs._sft_samples(cfg)[: cfg.train.mini_batch_samples])
    return gradients
