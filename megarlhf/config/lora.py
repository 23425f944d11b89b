"""Configuration of a low-rank adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import PositiveInt, field_validator

from megarlhf.config.frozen import FrozenModel, NonNegative, Positive

Targets = Literal["all-linear"] | tuple[str, ...]

ADAPTER_SUFFIX = "_adapter"
"""Suffix of a role's name in the name of the folder of its exported adapter."""

FULL_RATES: Mapping[str, float] = MappingProxyType({"sft": 1e-5, "rm": 5e-6, "dpo": 5e-7, "rl": 1e-6})
"""Learning rate that `megarlhf init` writes for training all weights, by command. Adapters mostly take ten times as
much."""


class LoraConfig(FrozenModel):
    path: Path | None = None
    """A PEFT adapter to start from: a directory with adapter_config.json and adapter_model.safetensors. It sets the
    defaults of the keys below, and a key that is given must agree with it."""
    rank: PositiveInt | None = None
    """Columns of B and rows of A. Default: 16."""
    alpha: Positive | None = None
    """The adapter adds (alpha / rank) x B A x. Default: twice the rank."""
    rslora: bool | None = None
    """Use alpha / sqrt(rank) instead. Default: false."""
    targets: Targets | None = None
    """Linear layers that get an adapter, by Hugging Face's names: `all-linear`, or a list of ends of names
    (`q_proj`, `mlp.down_proj`) or patterns with `*`, `?` or `[...]` (`model.layers.1?.self_attn.*`). Embedding, head,
    router and norms get none. A pattern that matches nothing is refused. Default: `all-linear`."""
    dropout: NonNegative = 0.0
    """Must be 0: log-probs have to be functions of the weights."""
    export: Literal["merged", "adapter", "both"] = "merged"
    """Content of exports. `merged`: the whole model with the adapter added to its weights, readable as any Hugging Face
    directory. `adapter`: the PEFT adapter alone, in a directory named ROLE`_adapter`. `both`: both of them."""

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                f"dropout = {dropout:g} is not supported: the log-probs of a step would be those of another model in "
                "each forward; leave it out, or use a smaller rank or learning rate against overfitting"
            )
        return dropout

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target(cls, targets: Any) -> Any:
        """Make a list of a single name."""
        return [targets] if isinstance(targets, str) and targets != "all-linear" else targets

    @field_validator("targets")
    @classmethod
    def _some_targets(cls, targets: Targets | None) -> Targets | None:
        if targets == ():
            raise ValueError("targets is empty: name linear layers, or all-linear")
        return targets
