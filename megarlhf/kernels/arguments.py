"""Checks of the public functions' arguments.

Legend: T tokens, N sequences, V vocabulary columns of this rank.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor


def require_inputs(values: Tensor, num_tokens: int, labels_T: Tensor, temperature: float) -> None:
    """Check logits or hidden states of `num_tokens` tokens, their labels, and the temperature.

    Raises: ValueError
    """
    if values.ndim != 2 or not values.is_floating_point():
        raise ValueError(
            f"logits or hidden states are {values.dtype} {list(values.shape)}; give bf16, fp16, fp32 or fp64 with two "
            "dimensions, tokens first"
        )
    if labels_T.shape != (num_tokens,) or labels_T.dtype != torch.int64:
        raise ValueError(
            f"labels are {labels_T.dtype} {list(labels_T.shape)} for {num_tokens} tokens; give int64 [{num_tokens}]"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature = {temperature}; give a number above 0 (for greedy sampling, 1)")


def require_mask(name: str, mask_T: Tensor, like_T: Tensor) -> None:
    """Check a mask: one bool per token, on the tokens' device.

    Raises: ValueError
    """
    if mask_T.shape != like_T.shape or mask_T.dtype != torch.bool:
        tokens = len(like_T)
        raise ValueError(f"{name} is {mask_T.dtype} {list(mask_T.shape)} for {tokens} tokens; give bool [{tokens}]")
    _require_same_device(name, mask_T, like_T)


def require_labels(labels_T: Tensor, kept_T: Tensor, vocab: int, ignore_index: int) -> None:
    """Check that labels of kept tokens are in [0, vocab).

    Raises: ValueError with the first label outside. On a GPU, where reading it would wait for the device, a device
            assertion.
    """
    bad_T = kept_T & ((labels_T < 0) | (labels_T >= vocab))
    if labels_T.device.type != "cpu":
        torch._assert_async(~bad_T.any(), f"a label is outside the vocabulary [0, {vocab}), and not ignore_index")
        return
    if bool(bad_T.any()):
        token = int(bad_T.nonzero()[0])
        raise ValueError(
            f"label {int(labels_T[token])} at token {token} is outside the vocabulary [0, {vocab}); "
            f"mask it with ignore_index = {ignore_index}, or check that tokenizer and model belong together"
        )


def require_device(backend: str, device_type: str, *, kernels: str = "log-prob", instead: str = "chunked") -> None:
    """Check that Triton has a GPU, or its interpreter.

    Raises: ValueError
    """
    if backend == "triton" and device_type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        key = " (kernels.logprobs)" if kernels == "log-prob" else ""
        raise ValueError(
            f"the triton backend of the {kernels} kernels needs a GPU, and this is a CPU; use auto or {instead}{key}, "
            "or set TRITON_INTERPRET=1 to try the kernels slowly"
        )


def require_column(name: str, x_T: Tensor, like_T: Tensor | None = None) -> None:
    """Check a column: one float per token, and length and device of another column, if given.

    Raises: ValueError
    """
    if x_T.ndim != 1 or not x_T.is_floating_point():
        raise ValueError(
            f"{name} is {x_T.dtype} {list(x_T.shape)}; give bf16, fp16, fp32 or fp64 with one dimension: the tokens of "
            "all sequences end to end"
        )
    if like_T is not None:
        if len(x_T) != len(like_T):
            raise ValueError(f"{name} has {len(x_T)} tokens, the values {len(like_T)}; give one number per token")
        _require_same_device(name, x_T, like_T)


def require_per_sequence(
    name: str, values_N: Tensor, num_sequences: int, like_T: Tensor, *, integers: bool = False
) -> None:
    """Check a column with one float (or integer) per sequence.

    Raises: ValueError
    """
    has_right_dtype = values_N.is_floating_point()
    if integers:
        has_right_dtype = not (has_right_dtype or values_N.is_complex() or values_N.dtype == torch.bool)
    if values_N.shape != (num_sequences,) or not has_right_dtype:
        kind = "integers" if integers else "floats"
        raise ValueError(
            f"{name} is {values_N.dtype} {list(values_N.shape)} for {num_sequences} sequences (cu_seqlens has "
            f"{num_sequences + 1} entries); give {kind} [{num_sequences}]"
        )
    _require_same_device(name, values_N, like_T)


def require_fraction(name: str, value: float) -> None:
    """Raises: ValueError"""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} = {value}; give a number from 0 to 1")


def require_cu_seqlens(cu_seqlens: Tensor, x_T: Tensor, *, asserted: bool) -> int:
    """Check `cu_seqlens` of all tokens in x_T. Returns the greatest length, or all tokens where only a device knows it.

    asserted: check numbers on a GPU by a device assertion, since reading them would wait for the device. False: the
        kernel does it itself.
    Raises: ValueError
    """
    num_tokens = len(x_T)
    expected = f"give int32 or int64 [N + 1]: 0 first, then the end of each sequence, {num_tokens} last"
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; {expected}")
    if len(cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens is empty; {expected} (for no sequence [0])")
    if cu_seqlens.device.type != "cpu":
        _require_same_device("cu_seqlens", cu_seqlens, x_T, "; or give it on the CPU, where it can be looked at")
        if asserted:
            is_right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == num_tokens) & (cu_seqlens.diff() >= 0).all()
            torch._assert_async(is_right, f"cu_seqlens falls, or is not 0 first and {num_tokens} last")
        return num_tokens
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0:
        raise ValueError(f"cu_seqlens begins with {first}; {expected}")
    lengths_N = cu_seqlens.diff()
    if bool((lengths_N < 0).any()):
        n = int((lengths_N < 0).nonzero()[0])
        start, end = cu_seqlens[n : n + 2].tolist()
        raise ValueError(f"cu_seqlens falls from {start} to {end} at sequence {n}; {expected}")
    if last != num_tokens:
        raise ValueError(f"cu_seqlens ends with {last}, but there are {num_tokens} tokens; {expected}")
    return int(lengths_N.max()) if len(lengths_N) else 0


def _require_same_device(name: str, tensor: Tensor, like_T: Tensor, otherwise: str = "") -> None:
    if tensor.device != like_T.device:
        raise ValueError(f"{name} is on {tensor.device}, the tokens are on {like_T.device}; move it there{otherwise}")
