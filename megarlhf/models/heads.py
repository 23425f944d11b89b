"""Heads in place of a GPTModel's `output_layer`. None of them computes logits.

Legend: S sequence, B batch, H hidden.
"""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class LanguageHead(nn.Module):
    """Head of a language model: holds the vocabulary matrix and passes the hidden states on. Log-probs are computed
    from both (`parallel/vocab.py`).

    The weight is the parameter of the layer that Megatron built, with all of Megatron's marks. It is None where the
    matrix is the embedding of the same stage.
    """

    def __init__(self, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        if weight is not None:
            weight.only_main_grad = True  # type: ignore[attr-defined]  # kernels/linear_logprob.py

    def forward(
        self, hidden_SBH: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> ([B, S, H], no bias). GPTModel transposes the result and makes it contiguous. Since this is a
        transposed view, it comes out as the original hidden states [S, B, H], without a copy."""
        return hidden_SBH.transpose(0, 1), None


class ScalarHead(nn.Module):
    """Head of critic and reward model: one number per token instead of a row of the vocabulary.

    The weight [1, H] is on every tensor-parallel rank. Under sequence parallelism the hidden states are gathered first,
    so each rank sees every token and computes the same gradient.

    The product is computed in fp32, whatever the model's dtype. In bf16, scores that differ by less than one part in
    256 would be equal or a whole step apart, and an advantage relative to the group would magnify that.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = groups.tp
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))

    def forward(
        self, hidden_SBH: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> ([S, B, 1] fp32, no bias)."""
        if self.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(
                hidden_SBH, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return nn.functional.linear(hidden_SBH.float(), self.weight.float()), None
