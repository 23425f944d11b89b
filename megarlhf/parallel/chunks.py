"""A rank's model as one module: a GPTModel, or the several of a rank that has virtual pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class ModelChunks(nn.Module):
    """The chunks of a rank, in the order in which a micro-batch passes them. Parameters are named as in a checkpoint of
    Megatron-Core, `model0.decoder...`, `model1.decoder...`. A schedule calls the chunks; the whole is never called."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        super().__init__()
        assert len(chunks) > 1, "a single chunk is the model itself"
        for v, chunk in enumerate(chunks):
            self.add_module(f"model{v}", chunk)

    @property
    def config(self) -> TransformerConfig:
        """Which all chunks share."""
        return chunks_of(self)[0].config


Model: TypeAlias = GPTModel | ModelChunks


def as_model(chunks: Sequence[GPTModel]) -> Model:
    """The module that these are."""
    return chunks[0] if len(chunks) == 1 else ModelChunks(chunks)


def chunks_of(model: Model) -> tuple[GPTModel, ...]:
    """First to last."""
    return tuple(model.children()) if isinstance(model, ModelChunks) else (model,)


def split_name(name: str) -> tuple[int, str]:
    """Of a parameter or module of a rank's model: its chunk, and its name there. The model itself is (0, "")."""
    first, _, rest = name.partition(".")
    number = first.removeprefix("model")
    return (int(number), rest) if number != first and number.isdigit() else (0, name)
