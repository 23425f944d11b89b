"""Checks of a machine for a configuration: kernels, and host memory for tensors that are offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import count_elements
from megarlhf.architectures.trained import count_trained, trained_tensors
from megarlhf.config import (
    ROLES,
    DPOConfig,
    EvaluateConfig,
    GenerateConfig,
    RLConfig,
    RMConfig,
    RoleConfig,
    SFTConfig,
    trained_roles,
)
from megarlhf.kernels.arguments import require_device
from megarlhf.layout import MeshLayout
from megarlhf.rollout.engines import engine_of

AnyConfig = SFTConfig | RMConfig | DPOConfig | RLConfig | GenerateConfig | EvaluateConfig

GIB = 2**30
OPTIMIZER_BYTES = {"fp32": 8, "bf16": 12, "auto": 8}
"""Bytes per parameter: Adam's two moments, and for bf16 a copy in fp32. `auto`, which only a checkpoint knows: the
least."""
_WIDTHS = {"fp32": 4, "bf16": 2, "auto": 2}


def draws(cfg: AnyConfig) -> TypeGuard[RLConfig | GenerateConfig | EvaluateConfig]:
    """Whether the run samples responses with an engine."""
    return isinstance(cfg, RLConfig | GenerateConfig) or (isinstance(cfg, EvaluateConfig) and cfg.generates)


def works_in_turns(cfg: AnyConfig, roles: Mapping[str, RoleConfig]) -> bool:
    """Whether roles or an engine take turns on the device, so that offloading weights makes room."""
    others = draws(cfg) and engine_of(cfg.rollout).has_own_weights
    return len(roles) > 1 or others or (isinstance(cfg, RLConfig) and cfg.ema is not None)


def check_kernels(roles: Mapping[str, RoleConfig], device_type: str) -> None:
    """Raises: ValueError for log-prob kernels that do not run on the device."""
    for name, section in roles.items():
        if ROLES[name].head == "lm":
            try:
                require_device(section.kernels.logprobs, device_type)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


def host_bytes(
    cfg: AnyConfig,
    roles: Mapping[str, RoleConfig],
    checked: Mapping[str, tuple[Architecture, MeshLayout]],
    *,
    device_type: str,
) -> dict[str, int]:
    """Least host memory of a rank for offloaded tensors, by key, as a mean over ranks.

    Roles on some ranks only are left out. No checkpoint is read.
    """
    auto = device_type != "cpu" and (
        isinstance(cfg, RLConfig | EvaluateConfig) or (isinstance(cfg, DPOConfig) and len(roles) > 1)
    )
    takes_turns, trained = works_in_turns(cfg, roles), trained_roles(cfg)
    world_size = max(layout.world_size for _, layout in checked.values())
    needed: dict[str, int] = {}
    for name, section in roles.items():
        arch, layout = checked[name]
        if layout.world_size < world_size or ROLES[name].is_actors_base(cfg):
            continue
        offload, dtype = section.offload, section.model.dtype
        dense, experts = count_elements(arch, ROLES[name].head)
        cut = layout.tp * layout.pp
        held = dense // cut + experts // (cut * layout.ep)
        if takes_turns and (offload.parameters is True or (offload.parameters == "auto" and auto)):
            needed[f"{name}.offload.parameters"] = _WIDTHS[dtype] * held
            if name == "actor" and isinstance(cfg, RLConfig) and cfg.ema is not None:
                needed["ema"] = _WIDTHS["fp32"] * held
        if name in trained and (offload.optimizer in (True, "stream") or (offload.optimizer == "auto" and auto)):
            # Each element is on one rank, or on every rank that has the parameter.
            local = held if section.optim.distributed is False else (dense + experts) // layout.world_size
            trained_elements, elements = count_trained(arch, ROLES[name].head, trained_tensors_of(arch, name, section))
            needed[f"{name}.offload.optimizer"] = OPTIMIZER_BYTES[dtype] * (local * trained_elements // elements)
    for key in engine_host_weights(cfg):
        assert isinstance(cfg, RLConfig)
        arch, _ = checked["actor"]
        width = _WIDTHS[cfg.actor.model.dtype if cfg.rollout.dtype == "auto" else cfg.rollout.dtype]
        needed[key] = width * sum(count_elements(arch)) // cfg.rollout.tp(cfg.actor)
    return needed


def engine_host_weights(cfg: AnyConfig) -> Mapping[str, str]:
    """`EngineSpec.host_weights` of the run's engine. Only in `rl` do roles work while an engine sleeps."""
    return engine_of(cfg.rollout).host_weights(cfg.rollout) if isinstance(cfg, RLConfig) else {}


def trained_tensors_of(arch: Architecture, name: str, section: RoleConfig) -> frozenset[str]:
    """Names of trained tensors of a role. `arch` includes the role's adapter."""
    return trained_tensors(arch, ROLES[name].head, freeze=section.freeze, train_only=section.train_only)


def check_host_memory(
    needed: Mapping[str, int], engine_values: Mapping[str, str], local_ranks: int, available: int
) -> None:
    """Check that a machine has the memory that each rank needs, by key.

    engine_values: the keys of the engine, with the values that need no host memory; for other keys that is false

    Raises: ValueError if it has less.
    """
    total = local_ranks * sum(needed.values())
    if total <= available:
        return
    parts = ", ".join(f"{key} {local_ranks * nbytes / GIB:,.1f}" for key, nbytes in needed.items())
    engine_remedy = "".join(f" ({key} to {value})" for key, value in engine_values.items())
    raise ValueError(
        f"offloading from {local_ranks} rank(s) takes at least {total / GIB:,.1f} GiB of this machine's host memory "
        f"({parts}), and {available / GIB:,.1f} GiB are available; set some of these keys to false{engine_remedy}, "
        "use more machines, or give the job more memory"
    )
