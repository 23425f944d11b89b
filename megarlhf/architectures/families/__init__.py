"""Every architecture that is known: one line each (docs/new-architecture.md)."""

from __future__ import annotations

from importlib import import_module

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
)
"""Files beside this one, each with its `FAMILY`; where Megatron's arguments fit several, the first is meant."""


def _family(file: str) -> Family:
    family: Family = import_module(f"megarlhf.architectures.families.{file}").FAMILY
    return family


FAMILIES: dict[str, Family] = {family.model_type: family for family in map(_family, _FILES)}
"""By `model_type`."""
