"""megarlhf: alignment of language models at Megatron scale."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """A module of `megarlhf.api`, imported only when it is asked for."""
    if name == "family_parts":
        return import_module(f"{__name__}.api.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
