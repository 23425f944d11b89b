"""Checks and notes on adapters and frozen tensors, from config.json and the headers of an adapter's files."""

from __future__ import annotations

from collections.abc import Mapping

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.trained import count_trained, in_words
from megarlhf.architectures.vllm_adapters import MAX_RANK, MODEL_TYPES
from megarlhf.config import DPOConfig, GenerateConfig, RLConfig, RoleConfig
from megarlhf.config.shared_base import separate_reference_reason
from megarlhf.planning.machine.capabilities import AnyConfig, head_of, trained_roles, trained_tensors_of
from megarlhf.weights.checkpoint.peft import notes_of, require_readable_by_peft


def check_trained(
    cfg: AnyConfig, roles: Mapping[str, RoleConfig], architectures: Mapping[str, Architecture]
) -> list[str]:
    """Check which tensors of each role are trained.

    Returns: notes on adapters and frozen tensors, in sentences. Raises: ValueError for an export that nobody could use.
    """
    notes = []
    for name, section in roles.items():
        arch, is_trained = architectures[name], name in trained_roles(cfg, roles)
        if section.lora is not None:
            notes += notes_of(name, section.lora, section.model.path)
            export = f"{name}.lora.export = {section.lora.export}"
            if section.lora.export != "merged" and section.model.random_init:
                raise ValueError(
                    f"{export} with {name}.model.random_init: the random model below the adapter is not stored, so "
                    "nobody could use the adapter; export merged"
                )
            if section.lora.export != "merged" and is_trained:
                try:
                    require_readable_by_peft(arch)
                except ValueError as error:
                    raise ValueError(f"{export}: {error}") from None
        if is_trained and (section.lora or section.freeze or section.train_only):
            counts = count_trained(arch, head_of(name), trained_tensors_of(arch, name, section))
            notes.append(f"{name}: {in_words(*counts)}{_adapter_note(arch)}")
    if isinstance(cfg, RLConfig | GenerateConfig) and cfg.rollout.lora == "adapter":
        _check_engine(cfg, architectures["actor"])
    if isinstance(cfg, RLConfig | DPOConfig) and "reference" in roles and cfg.actor.lora is not None:
        if cfg.reference_is_base:
            notes.append("reference: the actor without its adapter; no second model is built")
        else:
            moves = isinstance(cfg, RLConfig) and cfg.reference_update is not None
            why = "it is moved" if moves else separate_reference_reason(cfg.actor, cfg.reference)
            notes.append(f"reference: a model of its own beside the actor's base: {why}")
    return notes


def _check_engine(cfg: RLConfig | GenerateConfig, arch: Architecture) -> None:
    """Raises: ValueError if vLLM cannot load the actor's adapter as one of its own."""
    if cfg.actor.lora is None or arch.adapter is None:
        raise ValueError("rollout.lora = adapter, but the actor has no adapter: give actor.lora, or leave it out")
    if cfg.rollout.engine != "vllm":
        raise ValueError(f"rollout.lora = adapter is for the engine vllm, and rollout.engine = {cfg.rollout.engine}")
    if arch.model_type not in MODEL_TYPES:
        raise ValueError(
            f"rollout.lora = adapter: vLLM's layers of {arch.model_type} do not support an adapter for each linear "
            f"layer ({', '.join(MODEL_TYPES)} do); set rollout.lora to merged"
        )
    if arch.adapter.rank > MAX_RANK:
        raise ValueError(
            f"rollout.lora = adapter: vLLM supports adapters up to rank {MAX_RANK}, and actor.lora has rank "
            f"{arch.adapter.rank}; set rollout.lora to merged"
        )


def _adapter_note(arch: Architecture) -> str:
    adapter = arch.adapter
    if adapter is None:
        return ""
    names = [target.module + ("" if target.layers is None else " (some layers)") for target in adapter.targets]
    root = "sqrt(rank)" if adapter.rslora else "rank"
    return f": a LoRA adapter of rank {adapter.rank}, alpha / {root} = {adapter.scale:g}, on {', '.join(names)}"
