"""What the public log-prob functions ask of their arguments.

Legend: T tokens, V vocabulary columns of this rank.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor


def require_inputs(values: Tensor, num_tokens: int, labels_T: Tensor, temperature: float) -> None:
    """Logits or hidden states of `num_tokens` tokens, their labels, and the temperature.

    Raises: ValueError
    """
    if values.ndim != 2 or not values.is_floating_point():
        raise ValueError(
            f"logits or hidden states are {values.dtype} {list(values.shape)}; give bf16, fp16, fp32 or fp64 of two "
            "dimensions, tokens first"
        )
    if labels_T.shape != (num_tokens,) or labels_T.dtype != torch.int64:
        raise ValueError(
            f"labels are {labels_T.dtype} {list(labels_T.shape)} for {num_tokens} tokens; give int64 [{num_tokens}]"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature = {temperature}; give a number above 0 (greedy sampling has log-probs at 1)")


def require_mask(mask_T: Tensor, num_tokens: int) -> None:
    """Raises: ValueError"""
    if mask_T.shape != (num_tokens,) or mask_T.dtype != torch.bool:
        raise ValueError(
            f"response_mask is {mask_T.dtype} {list(mask_T.shape)} for {num_tokens} tokens; give bool [{num_tokens}]"
        )


def require_labels(labels_T: Tensor, kept_T: Tensor, vocab: int, ignore_index: int) -> None:
    """Labels of kept tokens are in [0, vocab).

    Raises: ValueError with the first label that is not; on a GPU, where asking would mean waiting for the device, a
            device assertion.
    """
    bad_T = kept_T & ((labels_T < 0) | (labels_T >= vocab))
    if labels_T.device.type != "cpu":
        torch._assert_async(~bad_T.any(), f"a label is outside the vocabulary [0, {vocab}), and not ignore_index")
        return
    if bool(bad_T.any()):
        where = int(bad_T.nonzero()[0])
        raise ValueError(
            f"label {int(labels_T[where])} at token {where} is outside the vocabulary [0, {vocab}); "
            f"mask it with ignore_index = {ignore_index}, or check that tokenizer and model belong together"
        )


def require_overwritable(logits_TV: Tensor) -> None:
    """Each number has a place of its own, and none of them belongs to a leaf.

    Raises: ValueError
    """
    base = logits_TV._base if logits_TV._is_view() else logits_TV
    if logits_TV.requires_grad and base is not None and base.is_leaf:
        raise ValueError(
            "inplace_backward would write the gradient over a leaf's own values; give it the result of an operation "
            "other than a view"
        )
    (low, few), (high, many) = sorted(zip(logits_TV.stride(), logits_TV.shape, strict=True))
    if min(few, many) > 0 and ((few > 1 and low == 0) or (many > 1 and high <= (few - 1) * low)):
        raise ValueError(
            f"inplace_backward needs a place for each number, got logits {list(logits_TV.shape)} expanded from fewer "
            f"(strides {logits_TV.stride()}); leave it out, or give contiguous logits"
        )


def require_device(backend: str, device_type: str) -> None:
    """Triton has a GPU, or its interpreter.

    Raises: ValueError
    """
    if backend == "triton" and device_type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        raise ValueError(
            "the triton backend of the log-prob kernels needs a GPU, this is a CPU; use auto or chunked "
            "(kernels.logprobs), or set TRITON_INTERPRET=1 to try the kernels slowly"
        )
