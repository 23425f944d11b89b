"""Kernels of Megatron-Core's optimizer on a GPU.

Where TransformerEngine is installed Megatron-Core takes its Adam, and its norm and scaling of many tensors at once,
which make no temporaries. Otherwise it takes torch's AdamW, which on a GPU updates all tensors at once with temporaries
as large as they are; it scales tensor by tensor with a temporary each, and waits for the norm of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarlhf.rehearsal.fake_device.fused import pass_over
from megarlhf.rehearsal.fake_device.megatron_patches import OptimizerKernels


class FusedAdam(torch.optim.AdamW):
    """transformer_engine/pytorch/optimizers/fused_adam.py, with the options that Megatron-Core gives it for the
    settings of `parallel/step.py`: two fp32 moments a parameter, made in the first step, and no temporaries.

    Megatron-Core makes it as it makes torch's AdamW. So do resume points: the state has a `step`, like AdamW's.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "no closure"
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            moments = [moment for parameter in trained for moment in self._state(parameter)]
            if trained:
                state = [*trained, *moments]  # read and written
                pass_over([*(parameter.grad for parameter in trained), *state], state)

    def _state(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1
        return state["exp_avg"], state["exp_avg_sq"]


class AllAtOnceAdamW(torch.optim.AdamW):
    """torch's AdamW as it runs on a GPU by default (torch/optim/optimizer.py, _default_to_fused_or_foreach). torch does
    not recognise rehearsed tensors as those of a GPU."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, foreach=True)


def scale(chunk_size: int, overflow: Tensor | None, tensor_lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """transformer_engine's multi_tensor_scale: each tensor of the first list times `factor` into that of the second."""
    read, written = tensor_lists
    if read:
        pass_over([*read], [*written])


def l2_norm(
    chunk_size: int, overflow: Tensor | None, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """transformer_engine's multi_tensor_l2norm: one number, still on the device."""
    (read,) = tensor_lists
    norm = torch.empty(1, dtype=torch.float32, device=read[0].device)
    pass_over([*read], [norm])
    return norm, None


KERNELS: Mapping[str, OptimizerKernels] = {
    "te": OptimizerKernels(FusedAdam, {"multi_tensor_scale_impl": scale, "l2_norm_impl": l2_norm}),
    "local": OptimizerKernels(AllAtOnceAdamW, {}),
}
"""Kernels by the layers of a rehearsed GPU."""
