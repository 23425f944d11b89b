"""Message to a worker about the tools of a run, as plain values. Only the standard library is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolSource:
    """One entry of `environment.tools`."""

    spec: Mapping[str, Any]
    """Entry of the configuration: `{function: PATH}`, `{mcp: COMMAND, ...}` or `{python: LIMITS}`."""
    descriptions: Sequence[Mapping[str, Any]]
    """Descriptions of its tools, as the model has read them."""


@dataclass(frozen=True)
class ToolsStart:
    """Tools of a run."""

    sources: Sequence[ToolSource]
    form: str
    """Form of calls, or `vllm:NAME`."""
    tokenizer: str
    """Directory of the tokenizer, for parsers of vLLM."""
    special: Sequence[str]
    """Texts of the tokenizer's special tokens. No result may contain them."""
    keys: Sequence[str]
    """Keys besides role and content that the chat template reads of a result: `name`, `tool_call_id`."""
    seconds: float
    """Time limit of a call."""
    max_characters: int
    """Most characters of a result."""

    @property
    def descriptions(self) -> list[Mapping[str, Any]]:
        """Descriptions of all tools."""
        return [description for source in self.sources for description in source.descriptions]
