"""An `Architecture` read from a Hugging Face `config.json`, and written as one: by the families' `ConfigSpec`s."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.config_spec import read_facts, write_facts
from megarlhf.architectures.families import family_of

ScoreOf = Literal["last_token", "response_mean"]
"""How one score of a text comes from a scalar head's numbers of its tokens."""
SCORE_OF = "megarlhf_score_of"
"""The key of config.json that says so; without it the last token's number is the score, as in transformers."""

ROUTER_AUX_LOSS_COEF = 0.001
"""transformers' own for its models with experts, where config.json has none."""


def score_of_config(config: Mapping[str, Any], where: str | PathLike[str]) -> ScoreOf:
    """Raises: ValueError for a word that is not known."""
    score_of = config.get(SCORE_OF, "last_token")
    if score_of == "response_mean":
        return "response_mean"
    if score_of == "last_token":
        return "last_token"
    raise ValueError(f"{where}: config.json says {SCORE_OF} = {score_of!r}, expected last_token or response_mean")


def architecture_from_hf(source: str | PathLike[str] | Mapping[str, Any]) -> Architecture:
    """The architecture of a Hugging Face directory or of its parsed `config.json`.

    Raises: ValueError on a missing key, or on anything the model code would compute wrongly.
    """
    config = source if isinstance(source, Mapping) else read_config(source)
    family = family_of(config.get("model_type"))
    return Architecture(model_type=family.model_type, **read_facts(config, family.config))


def router_aux_loss_of_config(config: Mapping[str, Any], where: str | PathLike[str]) -> tuple[float, str]:
    """Weight of the load-balancing loss in transformers' training of a model with experts, and the reason.

    Raises: ValueError for a value that is none.
    """
    asked, coefficient = config.get("output_router_logits"), config.get("router_aux_loss_coef")
    if asked not in (None, True, False):
        raise ValueError(
            f"{where}: config.json has output_router_logits = {asked!r}, expected true or false; correct it"
        )
    if not asked:
        reason = "has no output_router_logits" if asked is None else "says output_router_logits: false"
        return 0.0, f"config.json {reason}"
    if coefficient is None:
        coefficient = ROUTER_AUX_LOSS_COEF
    if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not 0 <= coefficient < math.inf:
        raise ValueError(
            f"{where}: config.json has router_aux_loss_coef = {coefficient!r}, expected a number, 0 or more; correct it"
        )
    return float(coefficient), "config.json says output_router_logits: true"


def hf_config(arch: Architecture, head: Literal["lm", "scalar"] = "lm") -> dict[str, Any]:
    """A `config.json` that `architecture_from_hf` reads back to `arch`, for a model that has none at hand.

    An architecture knows no token ids: they are null, so that nobody takes a library's default for the model's own.

    Raises: ValueError when the model type has no way to state `arch`.
    """
    family = family_of(arch.model_type)
    config: dict[str, Any] = {
        "architectures": [hf_class(arch.model_type, head)],
        "model_type": arch.model_type,
        **write_facts(vars(arch), family.config),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if head == "scalar":
        config["num_labels"] = 1
    read_back = architecture_from_hf(config)
    different = [f.name for f in fields(arch) if getattr(read_back, f.name) != getattr(arch, f.name)]
    if different:
        raise ValueError(
            f"a config.json of model_type {arch.model_type!r} cannot say "
            f"{', '.join(f'{name} = {getattr(arch, name)!r}' for name in different)}; use another model_type"
        )
    return config


def hf_class(model_type: str, head: Literal["lm", "scalar"]) -> str:
    """transformers' class of the model with this head, as `architectures` in config.json names it."""
    config = family_of(model_type).config
    return config.lm_class if head == "lm" else config.scalar_class


def read_config(directory: str | PathLike[str]) -> dict[str, Any]:
    """The parsed `config.json` of a Hugging Face directory."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a Hugging Face model directory, which has a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); copy the file again from its source") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected a JSON object; copy it again")
    return config
