"""Configuration of `megarlhf generate` at a terminal: a file of `generate` without its data and the use of
responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import model_validator

from megarlhf.config.generate import GenerateConfig

NOT_READ = ("rewards", "eval", "select", "pairs_per_prompt", "min_reward", "out", "max_samples")
"""Keys about many responses, which are ignored. Of `data` only limits and template are read."""
TERMINAL = Path("prompts of the terminal")
"""Stand-in for `data.train`."""


class AskConfig(GenerateConfig):
    """Configuration for responses to typed prompts."""

    prompts: tuple[str, ...] = ()
    """Prompts of the command line; none: they are read line by line."""

    @model_validator(mode="before")
    @classmethod
    def _without_data(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        data = tree.get("data") or {}
        if not isinstance(data, dict):
            return tree
        kept = {key: value for key, value in data.items() if key not in ("validation", "test", "cache", "workers")}
        return {**{k: v for k, v in tree.items() if k not in NOT_READ}, "data": {**kept, "train": TERMINAL}}
