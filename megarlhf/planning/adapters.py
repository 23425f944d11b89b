"""Checks and notes on adapters and frozen tensors, from config.json and the headers of an adapter's files."""

from __future__ import annotations

from collections.abc import Mapping

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.trained import count_trained, in_words
from megarlhf.config import ROLES, DPOConfig, GenerateConfig, RLConfig, RoleConfig, trained_roles
from megarlhf.config.lora import FULL_RATES
from megarlhf.config.shared_base import separate_reference_reason
from megarlhf.planning.machine.capabilities import AnyConfig, trained_tensors_of
from megarlhf.rollout.engines import engine_of
from megarlhf.weights.checkpoint.peft import notes_of, require_readable_by_peft


def check_trained(
    cfg: AnyConfig, roles: Mapping[str, RoleConfig], architectures: Mapping[str, Architecture]
) -> list[str]:
    """Check which tensors of each role are trained.

    Returns: notes on adapters and frozen tensors, in sentences. Raises: ValueError for an export that nobody could use.
    """
    notes = []
    for name, section in roles.items():
        arch, is_trained = architectures[name], name in trained_roles(cfg)
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
        rate = FULL_RATES.get(cfg.command, 0.0)
        if is_trained and section.lora is not None and section.optim.lr <= rate:
            notes.append(
                f"{name}.optim.lr = {section.optim.lr:g} is a learning rate for training all weights (init writes "
                f"{rate:g} for {cfg.command}); an adapter mostly takes ten times as much (docs/lora.md)"
            )
        if is_trained and (section.lora or section.freeze or section.train_only):
            counts = count_trained(arch, ROLES[name].head, trained_tensors_of(arch, name, section))
            notes.append(f"{name}: {in_words(*counts)}{_adapter_note(arch)}")
    if isinstance(cfg, RLConfig | GenerateConfig) and cfg.rollout.lora == "adapter":
        if cfg.actor.lora is None or architectures["actor"].adapter is None:
            raise ValueError("rollout.lora = adapter, but the actor has no adapter: give actor.lora, or leave it out")
        engine_of(cfg.rollout).check_adapter(cfg.rollout, architectures["actor"])
    if isinstance(cfg, RLConfig | DPOConfig) and "reference" in roles and cfg.actor.lora is not None:
        if cfg.reference_is_base:
            notes.append("reference: the actor without its adapter; no second model is built")
        else:
            moves = isinstance(cfg, RLConfig) and cfg.reference_update is not None
            why = "it is moved" if moves else separate_reference_reason(cfg.actor, cfg.reference)
            notes.append(f"reference: a model of its own beside the actor's base: {why}")
    return notes


def _adapter_note(arch: Architecture) -> str:
    adapter = arch.adapter
    if adapter is None:
        return ""
    names = [target.module + ("" if target.layers is None else " (some layers)") for target in adapter.targets]
    root = "sqrt(rank)" if adapter.rslora else "rank"
    return f": a LoRA adapter of rank {adapter.rank}, alpha / {root} = {adapter.scale:g}, on {', '.join(names)}"
