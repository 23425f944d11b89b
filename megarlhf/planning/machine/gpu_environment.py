"""Variables that a run on GPUs needs, to be set before CUDA starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version

from megarlhf.config import RoleConfig
from megarlhf.runtime import sees_gpus

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of torch's settings of its allocators, the new one and the old one."""
ROUNDED = "pinned_max_round_threshold_mb"
ROUNDED_SINCE = (2, 13)
"""Of torch. An earlier one ends at its first use of CUDA for a key that it does not know."""


def gpu_environment(
    roles: Mapping[str, RoleConfig], environ: Mapping[str, str] = os.environ, *, on_gpu: bool | None = None
) -> dict[str, str]:
    """What the user has not set already, by name; nothing without a GPU.

    CUDA_DEVICE_MAX_CONNECTIONS    with tensor parallelism Megatron-Core begins an all-gather or a reduction and then a
                                   product that does not need it. Only with one queue from the host is the message sure
                                   to come first; behind the product it would hide nothing
    PYTORCH_ALLOC_CONF             torch makes a pinned allocation as large as the next power of two. What leaves the
                                   device is a few buffers of many GiB: half as much host memory again would be lost

    Source: Megatron-Core, tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication; torch,
            ATen/core/CachingHostAllocator.h
    """
    if not (sees_gpus() if on_gpu is None else on_gpu):
        return {}
    found = {}
    if QUEUES not in environ and any(role.parallel.tp > 1 for role in roles.values()):
        found[QUEUES] = "1"
    settings = next((name for name in ALLOCATORS if environ.get(name)), ALLOCATORS[0])
    before = environ.get(settings, "")
    if ROUNDED not in before and _torch() >= ROUNDED_SINCE:
        found[settings] = f"{before},{ROUNDED}:1".removeprefix(",")
    return found


def _torch() -> tuple[int, ...]:
    """Major and minor version of torch."""
    return tuple(int(part) for part in version("torch").split(".")[:2])
