"""The one file that makes Megatron-Core run without CUDA.

Megatron-Core 0.16.1 names CUDA outright in p2p communication, schedules, gradient buffers and the optimizer.
`megatron_device(device)` is a *scope*: inside it those few names mean `device`, which may be the CPU or any other that
is not CUDA. Outside it nothing is changed, so vLLM in the same process never sees it. On a GPU the scope does nothing.

Substitutions and their reasons:
  torch.cuda.{current_device, synchronize, set_device, current_stream, default_stream, Stream}
      called unconditionally in p2p_communication.py, param_and_grad_buffer.py, schedules.py
  a `cuda` device argument of any torch function
      `device="cuda"` in schedules.py (total_num_tokens), clip_grads.py, optimizer.py
  Tensor.cuda()
      optimizer.py, distrib_optimizer.py
  Tensor.type() -> "torch.cuda.FloatTensor"
      distrib_optimizer.py sorts parameters into fp32 and half by this string
  moving message sizes to the host
      moe/token_dispatcher.py does so for tensors of a GPU only, and passes others to all_to_all as tensors
  the state of CUDA's random numbers
      tensor_parallel/random.py saves it around recomputation; nothing draws from it (dropout is 0)
  the norm of many gradients, where Megatron-Core falls back to torch's
      on a CPU torch.norm adds up in fp32 one after the other: 1e-3 too little for 28 million numbers
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megarlhf.packages import version_of

TESTED = "0.16.1"
ROW = 1024
"""Numbers that are summed in fp32. The sums of rows are summed in fp64."""


class _InPlaceOfCuda(TorchFunctionMode):
    """Replaces a `cuda` device argument by another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return "torch.cuda." + func(*args).rpartition(".")[2]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], self._device, *args[2:])
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": self._device}
            return func(*args, **kwargs)
        return func(*args)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _NoStream(torch.cpu.Stream):
    """torch's own stand-in for a stream, which takes any arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return self

    def synchronize(self) -> None: ...


# Not torch.cpu's functions themselves: torch.compile refuses an object that has two names.
_CUDA_SUBSTITUTES: dict[str, Any] = {
    "synchronize": lambda device=None: None,
    "set_device": lambda device: None,
    "current_stream": lambda device=None: _NoStream(),
    "default_stream": lambda device=None: _NoStream(),
    "Stream": _NoStream,
}


_RANDOM_SUBSTITUTES: dict[str, Any] = {
    "_get_cuda_rng_state": lambda *args, **named: torch.empty(0, dtype=torch.uint8),
    "_set_cuda_rng_state": lambda *args, **named: None,
}


def _sizes_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Substitute for upstream's `maybe_move_tensor_to_cpu`."""
    return tensor.tolist() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def norm_of(tensor: Tensor) -> Tensor:
    """Euclidean norm of all elements as fp64, with a relative error of at most 1e-7 on any device."""
    flat = tensor.reshape(-1)
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return torch.linalg.vector_norm(torch.cat([rows, rest.reshape(1)]), dtype=torch.float64)


def _norm_of_many(
    chunk_size: int, overflow: Tensor | None, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Substitute for upstream's `local_multi_tensor_l2_norm`."""
    norms = torch.stack([norm_of(tensor) for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(norms).float().reshape(1), None


@contextlib.contextmanager
def megatron_device(device: torch.device) -> Iterator[None]:
    """Scope in which Megatron-Core works on `device`. Nests.

    Raises: RuntimeError without CUDA when Megatron-Core is not the version this file was checked with.
    """
    if device.type == "cuda":
        yield
        return
    installed = version_of("megatron-core")
    if installed != TESTED:
        raise RuntimeError(
            f"running Megatron-Core without CUDA is checked with version {TESTED}, found {installed}; "
            f"install megatron-core=={TESTED} or extend megarlhf/parallel/megatron_cpu.py"
        )
    substitutes = {**_CUDA_SUBSTITUTES, "current_device": lambda: device}
    originals = {name: getattr(torch.cuda, name) for name in substitutes}
    random_originals = {name: getattr(megatron_random, name) for name in _RANDOM_SUBSTITUTES}
    for name, substitute in substitutes.items():
        setattr(torch.cuda, name, substitute)
    for name, substitute in _RANDOM_SUBSTITUTES.items():
        setattr(megatron_random, name, substitute)
    move_to_host = token_dispatcher.maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = _sizes_on_host
    norm_of_many = clip_grads.l2_norm_impl
    if device.type == "cpu" and norm_of_many is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm_of_many
    try:
        with _InPlaceOfCuda(device):
            yield
    finally:
        for name, original in originals.items():
            setattr(torch.cuda, name, original)
        for name, original in random_originals.items():
            setattr(megatron_random, name, original)
        token_dispatcher.maybe_move_tensor_to_cpu = move_to_host
        clip_grads.l2_norm_impl = norm_of_many
