"""Every architecture that is known: one line each (docs/new-architecture.md)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megarlhf.architectures.table import Family

_FILES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "opt",
    "mixtral",
    "qwen3_moe",
    "phi3",
)
"""Files beside this one, each with its `FAMILY`; where Megatron's arguments fit several, the first is meant."""


def _family(file: str) -> Family:
    family: Family = import_module(f"megarlhf.architectures.families.{file}").FAMILY
    return family


FAMILIES: dict[str, Family] = {family.model_type: family for family in map(_family, _FILES)}
"""Families by `model_type`; `register` adds those of the user."""

_MODULES: dict[str, str] = {}
"""The user's module of each registered family, by `model_type`."""


def register(family: Family, module: str) -> None:
    """Add a family of the user, from this module. A module, or a family, may be registered again.

    Raises: ValueError if its `model_type` is that of another family.
    """
    known = FAMILIES.get(family.model_type, family)
    if known is not family and _MODULES.get(family.model_type) != module:
        other = _MODULES.get(family.model_type, "megarlhf")
        raise ValueError(
            f"the model families of {module} and of {other} are both called {family.model_type!r}; give the own one "
            "another model_type, here and in its config.json, or leave its module out of model.families"
        )
    FAMILIES[family.model_type], _MODULES[family.model_type] = family, module


def family_of(model_type: Any) -> Family:
    """Raises: ValueError that lists the known ones."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"config.json has model_type {model_type!r}; known: {', '.join(sorted(FAMILIES))}. "
            "Use a model of a known type, or write a family of your own and name its module in model.families, or by "
            "--family for a command without a configuration (docs/new-architecture.md)"
        )
    return FAMILIES[model_type]
