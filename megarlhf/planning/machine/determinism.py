"""What a run with `run.deterministic` needs of the environment and of the devices; what cannot be had is refused.

docs/determinism.md names the kernels that need it, and where that is written.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.config import DPOConfig, EvaluateConfig, GenerateConfig, RLConfig, RMConfig, SFTConfig
from megarlhf.runtime import Runtime, compute_capability, has_transformer_engine, sees_gpus

AnyConfig = SFTConfig | RMConfig | DPOConfig | RLConfig | GenerateConfig | EvaluateConfig

ACCEPTED: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "^NVLS", "ring,tree;allreduce:tree"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "VLLM_BATCH_INVARIANT": ("1",),
}
"""Values that a user may have set; what is not set becomes the first. What each is for:

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
"""What vLLM sets for a batch-invariant engine of several ranks, so that the order of a sum does not depend on the
number of tokens. NCCL reads most of it at its first call, and in the trainer's processes that is before vLLM's."""

INVARIANT_ATTENTION = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
"""vLLM's attention backends that are batch-invariant, of those that the families of this project can use."""


@dataclass(frozen=True)
class DeviceTraits:
    """What the choice of kernels depends on."""

    capability: tuple[int, int]
    """Compute capability, such as (9, 0) for an H100."""
    transformer_engine: bool
    """Whether layers are TransformerEngine's."""
    flash_attention: tuple[int, ...] | None
    """Version of the package flash-attn, None without it."""


def environment(
    cfg: AnyConfig, environ: Mapping[str, str] = os.environ, *, on_gpu: bool | None = None
) -> dict[str, str]:
    """Variables that the run needs, to be set before the first library reads them; none unless `run.deterministic`.

    Raises: ValueError for a variable that is set to something else, and for an option of vLLM that rules it out.
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
            f"run.deterministic = true, but the environment chooses kernels that are not: {'; '.join(wrong)}. Unset "
            "that, or set run.deterministic to false"
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
    """Raises ValueError for an attention backend that vLLM has no batch-invariant kernels for."""
    if not engine_ranks(cfg):
        return
    assert isinstance(cfg, RLConfig | GenerateConfig | EvaluateConfig)
    given = cfg.rollout.engine_args
    section = given.get("attention_config")
    backend = given.get("attention_backend") or (section.get("backend") if isinstance(section, Mapping) else None)
    if backend is not None and str(backend).upper() not in ("AUTO", *INVARIANT_ATTENTION):
        raise ValueError(
            f"run.deterministic = true, but rollout.engine_args asks for the attention backend {backend}, with which "
            f"vLLM's responses depend on the requests beside them; use {', '.join(INVARIANT_ATTENTION)} or leave it out"
        )


def require_deterministic_device(cfg: AnyConfig, runtime: Runtime) -> None:
    """Collective where `run.deterministic` is set.

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
    """Which kernels of the run are not deterministic on such a GPU, and the ways out, in sentences."""
    problems = []
    major, minor = device.capability
    if engine_ranks(cfg) and major < 9:
        problems.append(
            f"vLLM is batch-invariant on a GPU of compute capability {major}.{minor} by replacing aten::linear and "
            "aten::matmul in this process, which is the trainer's too, and no gradient passes through its replacements "
            "(vllm/model_executor/determinism/batch_invariant.py); expected 9.0 or higher. Use rollout.engine=megatron"
        )
    trains = not isinstance(cfg, GenerateConfig | EvaluateConfig)
    flash = device.flash_attention is not None and device.flash_attention >= (2, 4, 1)
    if trains and device.transformer_engine and major != 9 and not flash:
        problems.append(
            "TransformerEngine's attention has a deterministic backward by cuDNN on compute capability 9.0 only, and "
            f"by flash-attn >= 2.4.1; got {major}.{minor}, and "
            + ("no flash-attn" if device.flash_attention is None else "an older flash-attn")
            + ". Install flash-attn >= 2.4.1, or uninstall transformer-engine: then torch's attention is used, whose "
            "backward has a deterministic variant"
        )
    return problems
