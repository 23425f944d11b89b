"""In which order a GPU begins kernels that run beside each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megarlhf.runtime import sees_gpus

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


def launch_order(
    roles: Mapping[str, Any], environ: Mapping[str, str] = os.environ, *, on_gpu: bool | None = None
) -> dict[str, str]:
    """A variable that the run needs, to be set before CUDA starts; none where it changes nothing or is set already.

    With tensor parallelism Megatron-Core begins an all-gather or a reduction and then a product that does not need it.
    Only with one queue from the host is the message sure to come first; behind the product it would hide nothing.

    roles: `RoleConfig` by name
    Source: Megatron-Core, tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication
    """
    on_gpu = sees_gpus() if on_gpu is None else on_gpu
    needed = on_gpu and any(role.parallel.tp > 1 for role in roles.values())
    return {NAME: "1"} if needed and NAME not in environ else {}
