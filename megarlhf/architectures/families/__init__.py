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
"""Families by `model_type`."""


def family_of(model_type: Any) -> Family:
    """Raises: ValueError that lists the known ones."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"config.json has model_type {model_type!r}; known: {', '.join(sorted(FAMILIES))}. "
            "Use a model of a known type, or add a family (docs/new-architecture.md)"
        )
    return FAMILIES[model_type]
