"""Type of `train.shuffle`, which assigns the samples of a step to mini-batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from megarlhf.config.old_keys import SHUFFLE


def _refuse_boolean(value: Any) -> Any:
    old = str(value).lower()
    if old in SHUFFLE:
        raise ValueError(
            f"{old} is no longer read, as there are three values now: write {SHUFFLE[old]} for the meaning of "
            f"{old}, or samples, groups or none"
        )
    return value


Shuffle = Annotated[Literal["samples", "groups", "none"], BeforeValidator(_refuse_boolean)]
