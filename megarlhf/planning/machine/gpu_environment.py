"""Variables of a run on GPUs, set before CUDA starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version

from megarlhf.config import RoleConfig
from megarlhf.runtime import sees_gpus

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with torch's settings of its allocators, the new name and the old one."""
ROUNDED = "pinned_max_round_threshold_mb"
ROUNDED_SINCE = (2, 13)
"""Torch version. Earlier ones end at their first use of CUDA for an unknown key."""


def gpu_environment(
    roles: Mapping[str, RoleConfig], environ: Mapping[str, str] = os.environ, *, on_gpu: bool | None = None
) -> dict[str, str]:
    """Values of variables that the user has not set, by name; none without a GPU.

    CUDA_DEVICE_MAX_CONNECTIONS    with tensor parallelism Megatron-Core starts an all-gather or a reduction, and then a
                                   product that does not need it. Only one queue from the host ensures that the message
                                   starts first; after the product it would overlap with nothing
    PYTORCH_ALLOC_CONF             torch rounds a pinned allocation up to a power of two. Offloaded tensors are a few
                                   buffers of many GiB, which would take half as much host memory again

    Source: Megatron-Core, tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication; torch,
            ATen/core/CachingHostAllocator.h
    """
    if not (sees_gpus() if on_gpu is None else on_gpu):
        return {}
    variables = {}
    if QUEUES not in environ and any(role.parallel.tp > 1 for role in roles.values()):
        variables[QUEUES] = "1"
    settings = next((name for name in ALLOCATORS if environ.get(name)), ALLOCATORS[0])
    before = environ.get(settings, "")
    torch_version = tuple(int(part) for part in version("torch").split(".")[:2])
    if ROUNDED not in before and torch_version >= ROUNDED_SINCE:
        variables[settings] = f"{before},{ROUNDED}:1".removeprefix(",")
    return variables
