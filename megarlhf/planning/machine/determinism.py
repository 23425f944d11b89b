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
from megarlhf.config import EvaluateConfig, GenerateConfig, RLConfig, RoleConfig
from megarlhf.planning.machine.capabilities import AnyConfig, draws
from megarlhf.rollout.engines import engine_of
from megarlhf.runtime import Runtime, compute_capability, has_transformer_engine, sees_gpus

ACCEPTED: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "^NVLS", "ring,tree;allreduce:tree"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
"""Values that a user may set; the first is the default.

CUBLAS_WORKSPACE_CONFIG            cuBLAS: a workspace of fixed size, or streams choose other kernels from run to run
NCCL_ALGO                          NCCL: no sums in the NVLink switch (NVLS), whose order is not fixed
NVTE_ALLOW_NONDETERMINISTIC_ALGO   TransformerEngine: no backward of attention that adds by atomics
"""


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

    Raises: ValueError for a variable with another value, and for a setting of the engine that is not deterministic.
    """
    if not cfg.run.deterministic:
        return {}
    on_gpu = sees_gpus() if on_gpu is None else on_gpu
    accepted = dict(ACCEPTED)
    if draws(cfg):
        engine_ranks = max(cfg.rollout.tp(role) for role in _drawing_roles(cfg))
        engine_of(cfg.rollout).check_deterministic(cfg.rollout)
        accepted |= engine_of(cfg.rollout).deterministic_environment(engine_ranks) if on_gpu else {}
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
    return {name: environ.get(name, values[0]) for name, values in accepted.items()}


def _drawing_roles(cfg: RLConfig | GenerateConfig | EvaluateConfig) -> list[RoleConfig]:
    """Sections of the roles that draw responses."""
    drawing = [cfg.actor, cfg.against] if isinstance(cfg, EvaluateConfig) else [cfg.actor]
    return [role for role in drawing if role is not None]


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
    if draws(cfg) and (problem := engine_of(cfg.rollout).deterministic_device_problem(device.capability)):
        problems.append(problem)
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
