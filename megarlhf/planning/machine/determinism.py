"""Environment and devices of a run with `run.deterministic`. A run that cannot be deterministic is refused.

docs/determinism.md names the kernels, with sources.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.config import EvaluateConfig, GenerateConfig, RLConfig
from megarlhf.planning.machine.capabilities import AnyConfig
from megarlhf.runtime import Runtime, compute_capability, has_transformer_engine, sees_gpus

ACCEPTED: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "^NVLS", "ring,tree;allreduce:tree"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "VLLM_BATCH_INVARIANT": ("1",),
}
"""Values that a user may set; the first is the default.

CUBLAS_WORKSPACE_CONFIG            cuBLAS: a workspace of fixed size, or streams choose other kernels from run to run
NCCL_ALGO                          NCCL: no sums in the NVLink switch (NVLS), whose order is not fixed
NVTE_ALLOW_NONDETERMINISTIC_ALGO   TransformerEngine: no backward of attention that adds by atomics
VLLM_BATCH_INVARIANT               vLLM: a response has the same bits whichever requests run beside it
"""

ENGINE_NCCL: Mapping[str, str] = {
    "NCCL_LAUNCH_MODE": "GROUP",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_NET_DISABLE": "1",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_PROTO": "Simple",
    "NCCL_ALGO": "ring,tree;allreduce:tree",
    "NCCL_NTHREADS": "1",
    "NCCL_SOCKET_NTHREADS": "1",
}
"""Variables that vLLM sets for a batch-invariant engine of several ranks, so that the order of a sum does not depend on
the number of tokens. NCCL reads most of them at its first call, which in the trainer's processes is before vLLM's."""

INVARIANT_ATTENTION = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
"""vLLM's batch-invariant attention backends, as far as this project's families can use them."""


@dataclass(frozen=True)
class DeviceTraits:
    """Properties of a device on which the choice of kernels depends."""

    capability: tuple[int, int]
    """Compute capability, such as (9, 0) for an H100."""
    transformer_engine: bool
    """Whether layers are TransformerEngine's."""
    flash_attention: tuple[int, ...] | None
    """Version of the package flash-attn; None if it is missing."""


def environment(
    cfg: AnyConfig, environ: Mapping[str, str] = os.environ, *, on_gpu: bool | None = None
) -> dict[str, str]:
    """Variables to set before the first library reads them; none unless `run.deterministic`.

    Raises: ValueError for a variable with another value, and for an option of vLLM that is not deterministic.
    """
    if not cfg.run.deterministic:
        return {}
    on_gpu = sees_gpus() if on_gpu is None else on_gpu
    engine = engine_ranks(cfg) if on_gpu else 0
    accepted = {name: values for name, values in ACCEPTED.items() if name != "VLLM_BATCH_INVARIANT" or engine}
    if engine > 1:
        accepted |= {name: (value,) for name, value in ENGINE_NCCL.items()}
    wrong = [
        f"{name} = {environ[name]!r}, expected {' or '.join(map(repr, values))}"
        for name, values in accepted.items()
        if environ.get(name, values[0]) not in values
    ]
    if wrong:
        raise ValueError(
            "run.deterministic = true, but the environment chooses kernels that are not deterministic: "
            f"{'; '.join(wrong)}. Unset these variables, or set run.deterministic to false"
        )
    _check_attention(cfg)
    return {name: environ.get(name, values[0]) for name, values in accepted.items()}


def engine_ranks(cfg: AnyConfig) -> int:
    """Ranks of one vLLM engine of the run; 0 without vLLM."""
    if isinstance(cfg, EvaluateConfig) and cfg.generates and cfg.rollout.engine == "vllm":
        return max(cfg.rollout.tp(role) for role in (cfg.actor, cfg.against) if role is not None)
    if not isinstance(cfg, RLConfig | GenerateConfig) or cfg.rollout.engine != "vllm":
        return 0
    return cfg.rollout.tp(cfg.actor)


def _check_attention(cfg: AnyConfig) -> None:
    """Raises: ValueError for an attention backend without batch-invariant kernels in vLLM."""
    if not engine_ranks(cfg):
        return
    assert isinstance(cfg, RLConfig | GenerateConfig | EvaluateConfig)
    engine_args = cfg.rollout.engine_args
    section = engine_args.get("attention_config")
    backend = engine_args.get("attention_backend") or (section.get("backend") if isinstance(section, Mapping) else None)
    if backend is not None and str(backend).upper() not in ("AUTO", *INVARIANT_ATTENTION):
        raise ValueError(
            f"run.deterministic = true, but rollout.engine_args sets the attention backend {backend}, with which "
            f"vLLM's responses depend on other requests; use {', '.join(INVARIANT_ATTENTION)} or leave it out"
        )


def require_deterministic_device(cfg: AnyConfig, runtime: Runtime) -> None:
    """Check the GPUs of a run with `run.deterministic`. Then it is collective.

    Raises: ValueError on every rank, for kernels of the run that are not deterministic on some rank's GPU.
    """
    if not cfg.run.deterministic:
        return
    with raise_on_all_ranks(lambda reasons: ValueError(f"run.deterministic = true: {'; '.join(reasons)}")) as problems:
        capability = compute_capability(runtime)
        if capability is not None:
            problems += device_problems(cfg, _device(capability))


def _device(capability: tuple[int, int]) -> DeviceTraits:
    try:
        version = importlib.metadata.version("flash-attn")
        flash = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    except importlib.metadata.PackageNotFoundError:
        flash = None
    return DeviceTraits(capability, has_transformer_engine(), flash)


def device_problems(cfg: AnyConfig, device: DeviceTraits) -> list[str]:
    """Kernels of the run that are not deterministic on such a GPU, with remedies, in sentences."""
    problems = []
    major, minor = device.capability
    if engine_ranks(cfg) and major < 9:
        problems.append(
            f"on a GPU of compute capability {major}.{minor} vLLM is batch-invariant by replacing aten::linear and "
            "aten::matmul in this process, which is also the trainer's, and its replacements have no gradient "
            "(vllm/model_executor/determinism/batch_invariant.py); expected 9.0 or higher. Use rollout.engine=megatron"
        )
    trains = not isinstance(cfg, GenerateConfig | EvaluateConfig)
    flash = device.flash_attention is not None and device.flash_attention >= (2, 4, 1)
    if trains and device.transformer_engine and major != 9 and not flash:
        installed = "no flash-attn" if device.flash_attention is None else "an older flash-attn"
        problems.append(
            "TransformerEngine's attention has a deterministic backward only by cuDNN on compute capability 9.0, or by "
            f"flash-attn >= 2.4.1; got {major}.{minor}, and {installed}. Install flash-attn >= 2.4.1, or uninstall "
            "transformer-engine: torch's attention, which is used then, has a deterministic backward"
        )
    return problems
