"""`train.shuffle`: which samples of a step go into which mini-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

_OF_SWITCH = {"true": "samples", "false": "none"}
"""What true and false meant, which it once was."""


def _no_switch(value: Any) -> Any:
    word = str(value).lower()
    if word in _OF_SWITCH:
        raise ValueError(
            f"{word} is no longer read, as there are three ways now: write {_OF_SWITCH[word]} for what {word} meant, "
            "samples, groups or none"
        )
    return value


Shuffle = Annotated[Literal["samples", "groups", "none"], BeforeValidator(_no_switch)]


def convert_old_shuffle(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that a run of an earlier version has written: true and false are what they meant."""
    train = config.get("train")
    if not isinstance(train, Mapping) or not isinstance(train.get("shuffle"), bool):
        return dict(config)
    return {**config, "train": {**train, "shuffle": _OF_SWITCH[str(train["shuffle"]).lower()]}}
