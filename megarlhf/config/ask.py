"""Configuration of `megarlhf generate` at a terminal: a file of `generate`, of which data and what becomes of responses
is not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import model_validator

from megarlhf.config.generate import GenerateConfig

NOT_READ = ("rewards", "eval", "select", "pairs_per_prompt", "min_reward", "out", "max_samples")
"""Keys about many responses. Of `data` its limits and its template are read."""
TERMINAL = Path("prompts of the terminal")
"""In place of `data.train`."""


class AskConfig(GenerateConfig):
    """Responses to prompts that are typed."""

    prompts: tuple[str, ...] = ()
    """Those of the command line; none: they are read line by line."""

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
