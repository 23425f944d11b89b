"""Calls of tools that a model has written. Only the standard library is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]
    """Arguments by name. Values are those of JSON, or texts where the form of the call writes no types."""
    id: str | None = None
    """Number that the model gave the call; None where the form has none."""


@dataclass(frozen=True)
class Unreadable:
    """A call that was begun and cannot be read."""

    text: str
    why: str
    """Reason, in words for the model."""


class ToolError(Exception):
    """Failure of a call, in words for the model."""
