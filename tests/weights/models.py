"""Random models of every family, made and written to disk by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.weights.families import config


def make_model(family: str, *, seed: int = 0, scalar: bool = False, **changes: Any) -> Any:
    """A transformers model in fp32, every parameter random: ones and zeros would hide a mistake."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    if scalar:
        model = AutoModelForSequenceClassification.from_config(config(family, num_labels=1, **changes))
    else:
        model = AutoModelForCausalLM.from_config(config(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.08 * torch.randn_like(parameter))
    return model.eval()


def write_model(
    family: str, directory: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "50GB", seed: int = 0,
    scalar: bool = False, **changes: Any
) -> Path:  # fmt: skip
    model = make_model(family, seed=seed, scalar=scalar, **changes).to(dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory
