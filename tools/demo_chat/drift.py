"""Whether a model still answers as the released one did, which `drift.yaml` counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def unchanged(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """1 where the answer is the released model's, letter by letter."""
    return float(response == fields["released"])


unchanged.required_fields = ("released",)  # type: ignore[attr-defined]
