"""What of each role is trained, and where an adapter makes a second model needless: decided from config.json and the
headers of an adapter's files."""

from __future__ import annotations

from collections.abc import Mapping

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.trained import count_trained, in_words
from megarlhf.config import DPOConfig, RLConfig, RoleConfig
from megarlhf.config.shared_base import why_apart
from megarlhf.planning.policies import AnyConfig, head_of, trained_roles, trained_tensors_of
from megarlhf.weights.checkpoint.peft import notes_of


def check_trained(
    cfg: AnyConfig, roles: Mapping[str, RoleConfig], architectures: Mapping[str, Architecture]
) -> list[str]:
    """Returns: what a start says of adapters and frozen tensors, in sentences. Raises: ValueError for an export that
    would be of no use."""
    notes = []
    for name, section in roles.items():
        arch, head = architectures[name], head_of(name)
        if section.lora is not None:
            notes += notes_of(name, section.lora, section.model.path)
            if section.lora.export != "merged" and section.model.random_init:
                raise ValueError(
                    f"{name}.lora.export = {section.lora.export} with {name}.model.random_init: the random model that "
                    "the adapter is on is stored nowhere, and nobody could use it; export merged"
                )
        if name in trained_roles(cfg, roles) and (section.lora or section.freeze or section.train_only):
            trained = trained_tensors_of(arch, name, section)
            notes.append(f"{name}: {in_words(*count_trained(arch, head, trained))}{_adapter_in_words(arch)}")
    if isinstance(cfg, RLConfig | DPOConfig) and "reference" in roles and cfg.actor.lora is not None:
        if cfg.reference_is_base:
            notes.append("reference: the actor with its adapter switched off; no second model is built")
        else:
            moves = isinstance(cfg, RLConfig) and cfg.reference_update is not None
            why = "it is moved" if moves else why_apart(cfg.actor, cfg.reference)
            notes.append(f"reference: a model of its own beside the actor's base: {why}")
    return notes


def _adapter_in_words(arch: Architecture) -> str:
    adapter = arch.adapter
    if adapter is None:
        return ""
    names = [target.module + ("" if target.layers is None else " (some layers)") for target in adapter.targets]
    root = "sqrt(rank)" if adapter.rslora else "rank"
    return f": a LoRA adapter of rank {adapter.rank}, alpha / {root} = {adapter.scale:g}, on {', '.join(names)}"
