"""megarlhf: alignment of language models at Megatron scale."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarlhf.api import family_parts
    from megarlhf.own_code.advantage import Advantage, advantage
    from megarlhf.trainers.rl.advantages import ADVANTAGES, AdvantageInputs
    from megarlhf.trainers.run.observers import Step, StepSamples

__version__ = "0.1.0"

_PLACES = {
    "ADVANTAGES": "megarlhf.trainers.rl.advantages",
    "Advantage": "megarlhf.own_code.advantage",
    "AdvantageInputs": "megarlhf.trainers.rl.advantages",
    "Step": "megarlhf.trainers.run.observers",
    "StepSamples": "megarlhf.trainers.run.observers",
    "advantage": "megarlhf.own_code.advantage",
}
"""Modules of the public names. They are imported when a name is first read."""

__all__ = [
    "ADVANTAGES",
    "Advantage",
    "AdvantageInputs",
    "Step",
    "StepSamples",
    "advantage",
    "family_parts",
]


def __getattr__(name: str) -> Any:
    if name == "family_parts":
        return import_module("megarlhf.api.family_parts")
    if name not in _PLACES:
        raise AttributeError(f"module 'megarlhf' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
