"""Type of `train.shuffle`, which assigns the samples of a step to mini-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

_OLD_VALUES = {"true": "samples", "false": "none"}
"""Meaning of the values of earlier versions."""


def _refuse_boolean(value: Any) -> Any:
    old = str(value).lower()
    if old in _OLD_VALUES:
        raise ValueError(
            f"{old} is no longer read, as there are three values now: write {_OLD_VALUES[old]} for the meaning of "
            f"{old}, or samples, groups or none"
        )
    return value


Shuffle = Annotated[Literal["samples", "groups", "none"], BeforeValidator(_refuse_boolean)]


def convert_old_shuffle(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace true and false in a configuration that a run of an earlier version wrote."""
    train = config.get("train")
    if not isinstance(train, Mapping) or not isinstance(train.get("shuffle"), bool):
        return dict(config)
    return {**config, "train": {**train, "shuffle": _OLD_VALUES[str(train["shuffle"]).lower()]}}
