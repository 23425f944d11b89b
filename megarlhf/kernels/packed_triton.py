"""Triton backend of the packed functions: a program walks one sequence, or one part of it, from its end.

Numbers are converted to fp32 first (for sums fp64). A block is loaded from its last token to its first. So the scan
runs forward over lanes, and positions before the sequence's first token are in the last lanes, from which a forward
scan takes nothing.

With many sequences there is one program per sequence, and every array is read and written once. With few sequences (16
of 8192 tokens would leave most of a GPU idle) a sequence is divided into parts: the first launch reduces each part to
two numbers, A_first = b + a A_behind; the second combines the numbers of the parts behind and writes. The inputs are
then read twice, but half as many steps depend on each other. The number of parts depends on the numbers of tokens and
sequences alone, not on lengths, which only the device may know.

Sums: each part writes its own, and torch adds a sequence's parts in their order. There are no atomics.

Legend: T tokens of all sequences end to end, N sequences, P parts of each, 2: a and b, 3: sum, sum of squares, count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarlhf.kernels.backends import on_device
from megarlhf.kernels.packed_inputs import CuSeqlens, GAEInputs
from megarlhf.kernels.packed_torch import group_moments

__all__ = ["LaunchConfig", "gae", "group_moments", "moments", "whiten"]


@dataclass(frozen=True)
class LaunchConfig:
    """Division of packed rows into programs."""

    tokens: int = 512
    """Tokens of a block, a power of two."""
    warps: int = 4
    """Warps of a program. Compiled for an H100, four tokens per thread take 62 registers: eight programs fit on each of
    its 132 multiprocessors, so that 1024 sequences run at once. With eight tokens per thread five would fit."""
    programs: int = 1024
    """Sequences are divided if they are fewer than a quarter of this; then parts make up this number."""
    blocks: int = 4
    """Sequences of up to this many blocks on average are not divided."""

    def parts(self, num_sequences: int, num_tokens: int) -> int:
        """Number of parts of each sequence."""
        if 4 * num_sequences >= self.programs or num_tokens <= self.blocks * self.tokens * num_sequences:
            return 1
        return min(self.programs // num_sequences, triton.cdiv(num_tokens, self.tokens))

    def fitted(self, sequences: CuSeqlens) -> tuple[int, int]:
        """(tokens, warps) of a block: not longer than the longest sequence, and at least four tokens per thread."""
        tokens = min(max(triton.next_power_of_2(sequences.max_seqlen), 128), self.tokens)
        return tokens, max(min(self.warps, tokens // 128), 1)


DEFAULT_LAUNCH = LaunchConfig()
"""Default of all kernels; `benchmarks.gpu_packed --sweep` tries others."""


@triton.jit
def _part(cu_ptr, num_tokens, BLOCK: tl.constexpr):
    """(sequence, first token, token behind the last) of this program's part; the parts are counted from the end."""
    n = tl.program_id(0).to(tl.int64)
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    tl.device_assert((n != 0) | (start == 0), "cu_seqlens does not begin with 0")
    tl.device_assert(start <= end, "cu_seqlens falls")
    tl.device_assert(end <= num_tokens, "cu_seqlens goes past the last token")
    tl.device_assert((n + 1 != tl.num_programs(0)) | (end == num_tokens), "cu_seqlens does not end with the last token")
    share = tl.cdiv(tl.cdiv(end - start, tl.num_programs(1)), BLOCK) * BLOCK
    stop = end - tl.program_id(1) * share
    return n, tl.maximum(stop - share, start), stop, end


@triton.jit
def _k3(x):
    """e^x - 1 - x. For |x| < 1, where terms would cancel, a power series with an error below 2e-11."""
    series = 1.0 / 6227020800.0
    series = series * x + 1.0 / 479001600.0
    series = series * x + 1.0 / 39916800.0
    series = series * x + 1.0 / 3628800.0
    series = series * x + 1.0 / 362880.0
    series = series * x + 1.0 / 40320.0
    series = series * x + 1.0 / 5040.0
    series = series * x + 1.0 / 720.0
    series = series * x + 1.0 / 120.0
    series = series * x + 1.0 / 24.0
    series = series * x + 1.0 / 6.0
    series = series * x + 0.5
    return tl.where(tl.abs(x) < 1.0, x * x * series, (tl.exp(x) - 1.0) - x)


@triton.jit
def _followed_by(a_behind, b_behind, a, b):
    """Compose x -> a x + b with the same map of the tokens behind."""
    return a * a_behind, b + a * b_behind


@triton.jit
def _terms(logprobs_ptr, ref_ptr, values_ptr, t, inside, end, score, gamma, kl_coef, KL: tl.constexpr):
    """(d_t, V_t) of a block. Without a KL neither log-prob is read. With KL = "rewards", `ref_ptr` has token
    rewards."""
    value = tl.load(values_ptr + t, mask=inside, other=0.0).to(tl.float32)
    behind = tl.load(values_ptr + t + 1, mask=inside & (t + 1 < end), other=0.0).to(tl.float32)
    term = tl.where(t == end - 1, score, 0.0)
    if KL == "rewards":
        term += tl.load(ref_ptr + t, mask=inside, other=0.0).to(tl.float32)
    elif KL != "none":
        log_ratio = tl.load(ref_ptr + t, mask=inside, other=0.0).to(tl.float32)
        log_ratio -= tl.load(logprobs_ptr + t, mask=inside, other=0.0).to(tl.float32)
        if KL == "k1":
            term += kl_coef * log_ratio
        elif KL == "k2":
            term -= kl_coef * (log_ratio * log_ratio * 0.5)
        elif KL == "abs":
            term -= kl_coef * tl.abs(log_ratio)
        else:
            term -= kl_coef * _k3(log_ratio)
    return term + gamma * behind - value, value


@triton.jit(debug=True, do_not_specialize=["num_tokens"])
def _scan_kernel(
    scanned_ptr, returns_ptr, parts_ptr, logprobs_ptr, ref_ptr, values_ptr, scores_ptr, cu_ptr,
    num_tokens, gamma, decay, kl_coef,
    KL: tl.constexpr, REDUCE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A_t = d_t + decay A_{t+1} of one part. REDUCE: write only the part's two numbers, for the next launch."""
    n, first, stop, end = _part(cu_ptr, num_tokens, BLOCK)
    lanes = tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + n).to(tl.float32)
    carry = tl.full([], 0.0, tl.float32)
    product = tl.full([], 1.0, tl.float32)
    if PARTS > 1 and not REDUCE:
        for p in range(tl.program_id(1)):
            at = parts_ptr + (n * PARTS + p) * 2
            carry = tl.load(at + 1) + tl.load(at) * carry
    for block in range(tl.cdiv(tl.maximum(stop - first, 0), BLOCK)):
        t = stop - 1 - block * BLOCK - lanes
        inside = t >= first
        term, value = _terms(logprobs_ptr, ref_ptr, values_ptr, t, inside, end, score, gamma, kl_coef, KL=KL)
        # Identity before the part's first token: the last lane then has the whole block's two numbers.
        a, b = tl.associative_scan((tl.where(inside, decay, 1.0), tl.where(inside, term, 0.0)), 0, _followed_by)
        scanned = b + a * carry
        carry = tl.sum(tl.where(lanes == BLOCK - 1, scanned, 0.0), 0)
        if REDUCE:
            product *= tl.sum(tl.where(lanes == BLOCK - 1, a, 0.0), 0)
        else:
            tl.store(scanned_ptr + t, scanned, mask=inside)
            tl.store(returns_ptr + t, scanned + value, mask=inside)
    if REDUCE:
        at = parts_ptr + (n * PARTS + tl.program_id(1)) * 2
        tl.store(at, product)
        tl.store(at + 1, carry)


@triton.jit(debug=True, do_not_specialize=["num_tokens"])
def _moments_kernel(parts_ptr, x_ptr, mask_ptr, cu_ptr, num_tokens, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """Sum, sum of squares and count of one part, in fp64."""
    n, first, stop, _ = _part(cu_ptr, num_tokens, BLOCK)
    lanes = tl.arange(0, BLOCK)
    total, squares = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    count = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.cdiv(tl.maximum(stop - first, 0), BLOCK)):
        t = stop - 1 - block * BLOCK - lanes
        inside = t >= first
        if MASK:
            inside = inside & (tl.load(mask_ptr + t, mask=inside, other=0) != 0)
        x = tl.load(x_ptr + t, mask=inside, other=0.0).to(tl.float32).to(tl.float64)
        total += x
        squares += x * x
        count += inside.to(tl.int32)
    at = parts_ptr + (n * tl.num_programs(1) + tl.program_id(1)) * 3
    tl.store(at, tl.sum(total, 0))
    tl.store(at + 1, tl.sum(squares, 0))
    tl.store(at + 2, tl.sum(count.to(tl.int64), 0).to(tl.float64))


@triton.jit(debug=True, do_not_specialize=["num_tokens"])
def _whiten_kernel(
    out_ptr, x_ptr, mask_ptr, mean_ptr, scale_ptr, cu_ptr, num_tokens,
    MASK: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`whiten` of one part."""
    n, first, stop, _ = _part(cu_ptr, num_tokens, BLOCK)
    mean, scale = tl.load(mean_ptr + n), tl.load(scale_ptr + n)
    for block in range(tl.cdiv(tl.maximum(stop - first, 0), BLOCK)):
        t = stop - 1 - block * BLOCK - tl.arange(0, BLOCK)
        inside = t >= first
        kept = inside
        if MASK:
            kept = inside & (tl.load(mask_ptr + t, mask=inside, other=0) != 0)
        x = tl.load(x_ptr + t, mask=kept, other=0.0).to(tl.float32).to(tl.float64)
        whitened = (x - mean) * scale
        if not SHIFT:
            whitened += mean
        tl.store(out_ptr + t, tl.where(kept, whitened, 0.0).to(tl.float32), mask=inside)


def gae(inputs: GAEInputs, sequences: CuSeqlens, launch: LaunchConfig = DEFAULT_LAUNCH) -> tuple[Tensor, Tensor]:
    """See `algo.gae`. One launch, or two where sequences are divided. With one, each array is read or written once."""
    num_sequences, num_tokens, device = sequences.num_sequences, sequences.num_tokens, inputs.values_T.device
    advantages_T, returns_T = torch.empty(2, num_tokens, device=device).unbind()
    if num_tokens == 0:
        return advantages_T, returns_T
    # Without a reference there is no KL, and the kernel reads neither array.
    kind, ref_T = "none", inputs.logprobs_T
    if inputs.token_rewards_T is not None:
        kind, ref_T = "rewards", inputs.token_rewards_T
    elif inputs.ref_logprobs_T is not None:
        kind, ref_T = inputs.kl_kind, inputs.ref_logprobs_T
    read = [tensor.contiguous() for tensor in (inputs.logprobs_T, ref_T, inputs.values_T, inputs.scores_N)]
    parts = launch.parts(num_sequences, num_tokens)
    tokens, warps = launch.fitted(sequences)
    parts_NP2 = torch.empty(num_sequences, parts, 2, device=device)
    with on_device(device):
        for reduce in (True, False) if parts > 1 else (False,):
            _scan_kernel[(num_sequences, parts)](
                advantages_T, returns_T, parts_NP2, *read, sequences.cu_seqlens, num_tokens,
                inputs.gamma, inputs.gamma * inputs.lam, inputs.kl_coef,
                KL=kind, REDUCE=reduce, PARTS=parts, BLOCK=tokens, num_warps=warps, sanitize_overflow=False,
            )  # fmt: skip
    return advantages_T, returns_T


def moments(x_T: Tensor, mask_T: Tensor | None, sequences: CuSeqlens, launch: LaunchConfig = DEFAULT_LAUNCH) -> Tensor:
    """See `algo.whitening.moments`."""
    num_sequences, num_tokens = sequences.num_sequences, sequences.num_tokens
    if num_tokens == 0:
        return torch.zeros(num_sequences, 3, dtype=torch.float64, device=x_T.device)
    parts = launch.parts(num_sequences, num_tokens)
    tokens, warps = launch.fitted(sequences)
    parts_NP3 = torch.empty(num_sequences, parts, 3, dtype=torch.float64, device=x_T.device)
    with on_device(x_T.device):
        _moments_kernel[(num_sequences, parts)](
            parts_NP3, x_T.contiguous(), _bytes(mask_T, x_T), sequences.cu_seqlens, num_tokens,
            MASK=mask_T is not None, BLOCK=tokens, num_warps=warps, sanitize_overflow=False,
        )  # fmt: skip
    return parts_NP3[:, 0] if parts == 1 else parts_NP3.sum(1)


def whiten(
    x_T: Tensor,
    mask_T: Tensor | None,
    sequences: CuSeqlens,
    mean_N: Tensor,
    scale_N: Tensor,
    shift_mean: bool,
    launch: LaunchConfig = DEFAULT_LAUNCH,
) -> Tensor:
    """See `algo.whitening.whiten`."""
    num_sequences, num_tokens = sequences.num_sequences, sequences.num_tokens
    out_T = torch.empty(num_tokens, device=x_T.device)
    if num_tokens == 0:
        return out_T
    tokens, warps = launch.fitted(sequences)
    with on_device(x_T.device):
        _whiten_kernel[(num_sequences, launch.parts(num_sequences, num_tokens))](
            out_T, x_T.contiguous(), _bytes(mask_T, x_T), mean_N.contiguous(), scale_N.contiguous(),
            sequences.cu_seqlens, num_tokens,
            MASK=mask_T is not None, SHIFT=shift_mean, BLOCK=tokens, num_warps=warps, sanitize_overflow=False,
        )  # fmt: skip
    return out_T


def _bytes(mask_T: Tensor | None, instead: Tensor) -> Tensor:
    """The mask as Triton reads it; without a mask any tensor, which is not read."""
    return instead if mask_T is None else mask_T.contiguous().view(torch.uint8)
