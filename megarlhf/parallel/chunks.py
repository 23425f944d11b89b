"""A rank's model as one module: a GPTModel, or several of them where the rank has virtual pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class ModelChunks(nn.Module):
    """Container of a rank's chunks, in the order in which a micro-batch passes them. It is never called itself: a
    schedule calls the chunks. Parameters have the names of Megatron-Core's checkpoints, `model0.decoder...`."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        super().__init__()
        assert len(chunks) > 1, "a single chunk is the model itself"
        for v, chunk in enumerate(chunks):
            self.add_module(f"model{v}", chunk)

    @property
    def config(self) -> TransformerConfig:
        """The configuration, which all chunks share."""
        return chunks_of(self)[0].config


Model: TypeAlias = GPTModel | ModelChunks


def as_model(chunks: Sequence[GPTModel]) -> Model:
    return chunks[0] if len(chunks) == 1 else ModelChunks(chunks)


def chunks_of(model: Model) -> tuple[GPTModel, ...]:
    """The model's chunks, first to last."""
    return tuple(model.children()) if isinstance(model, ModelChunks) else (model,)


def split_name(name: str) -> tuple[int, str]:
    """Split the name of a parameter or module into its chunk and its name there.

    Examples: "model1.decoder.x" -> (1, "decoder.x"); "decoder.x" -> (0, "decoder.x"); "" -> (0, "")
    """
    first, _, rest = name.partition(".")
    chunk = first.removeprefix("model")
    return (int(chunk), rest) if chunk != first and chunk.isdigit() else (0, name)
