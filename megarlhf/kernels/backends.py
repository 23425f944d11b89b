"""Choice of the backend: Triton on a GPU, torch elsewhere and for fp64. The choice is logged once."""

from __future__ import annotations

import functools
import importlib.util
import logging
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megarlhf.kernels.arguments import require_device
from megarlhf.kernels.statistics import working_dtype

log = logging.getLogger(__name__)


def choose_backend(asked: str, *tensors: Tensor | None, device: torch.device, kernels: str, fallback: str) -> str:
    """Choose the backend of the kernels named `kernels`. `auto` is Triton where it can run, else `fallback`.

    Raises: ValueError where Triton is asked for and cannot run.
    """
    in_fp64, device_type = working_dtype(*tensors) == torch.float64, device.type
    backend = asked
    if asked == "auto":
        backend = "triton" if device_type != "cpu" and has_triton() and not in_fp64 else fallback
    elif asked == "triton" and in_fp64:
        raise ValueError(f"the triton backend computes in fp32, got fp64; use auto, {fallback} or reference")
    require_device(backend, device_type, kernels=kernels, instead=fallback)
    why = "asked for" if backend == asked else "the fastest here"
    if device_type != "cpu" and backend == fallback and asked == "auto":
        why = "Triton computes in fp32" if in_fp64 else "Triton is not installed"
    log_once(log, f"{kernels} kernels on {device_type}{', fp64' if in_fp64 else ''}: {backend} ({why})")
    return backend


@functools.cache
def has_triton() -> bool:
    """Look for Triton without importing it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def log_once(logger: logging.Logger, message: str) -> None:
    """Log a message at level info, once per process."""
    logger.info(message)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Scope for Triton launches, which use the current device, not the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
