"""Configuration of a low-rank adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt, field_validator

from megarlhf.config.frozen import FrozenModel, NonNegative, Positive

Targets = Literal["all-linear"] | tuple[str, ...]


ADAPTER_SUFFIX = "_adapter"
"""Behind the name of a role: the folder of its exported adapter."""


class LoraConfig(FrozenModel):
    path: Path | None = None
    """A PEFT adapter to start from: a directory with adapter_config.json and adapter_model.safetensors. What is left
    out below is then as it says, and what is given has to be what it says."""
    rank: PositiveInt | None = None
    """Columns of B and rows of A. Left out: 16."""
    alpha: Positive | None = None
    """The adapter adds (alpha / rank) x B A x. Left out: twice the rank."""
    rslora: bool | None = None
    """alpha / sqrt(rank) in its place. Left out: false."""
    targets: Targets | None = None
    """Linear layers that have an adapter, by Hugging Face's names: `all-linear`, or a list of ends of names
    (`q_proj`, `mlp.down_proj`) or patterns with `*`, `?` or `[...]` (`model.layers.1?.self_attn.*`). Embedding, head,
    router and norms have none. A pattern that names nothing is refused. Left out: `all-linear`."""
    dropout: NonNegative = 0.0
    """0 only: log-probs have to be functions of the weights."""
    export: Literal["merged", "adapter", "both"] = "merged"
    """What exports hold. `merged`: the whole model with the adapter added to its weights, for whatever reads a Hugging
    Face directory. `adapter`: a PEFT adapter alone, in a directory with `_adapter` behind the role's name. `both`."""

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
        """A single name is a list of it."""
        return [targets] if isinstance(targets, str) and targets != "all-linear" else targets

    @field_validator("targets")
    @classmethod
    def _some_targets(cls, targets: Targets | None) -> Targets | None:
        if targets == ():
            raise ValueError("targets is empty: name linear layers, or all-linear")
        return targets
