"""The interface of objects whose state a resume point keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """An object that is registered with the checkpointer of a run, by name."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, texts, lists and mappings with text keys, as JSON takes them; a copy."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        ...
