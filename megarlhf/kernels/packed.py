"""Advantages, returns, sums and whitening of sequences that stand end to end, without padding.

Floats are added in a fixed order (no atomics), so runs repeat bit for bit on one machine. No gradient flows through
these functions; sums, means and whitening refuse inputs that require one.

Legend: T tokens of all sequences end to end, N sequences.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megarlhf.algo.kl import KL_ESTIMATORS, KLKind
from megarlhf.kernels import packed_reference, packed_torch
from megarlhf.kernels.arguments import (
    require_column,
    require_cu_seqlens,
    require_fraction,
    require_mask,
    require_per_sequence,
)
from megarlhf.kernels.backends import choose_backend
from megarlhf.kernels.packed_inputs import CuSeqlens, GAEInputs
from megarlhf.kernels.statistics import working_dtype

PackedBackend = Literal["auto", "triton", "torch", "reference"]
"""`auto`: Triton on a GPU, torch on a CPU and for fp64."""


class Moments(NamedTuple):
    """Sums that add up over ranks: all-reduce each with SUM to get those of the whole batch. [N] per sequence, or
    0-d."""

    total: Tensor
    """Sum of the elements, fp64."""
    squares: Tensor
    """Sum of their squares, fp64."""
    num_elements: Tensor
    """Number of elements, fp64."""

    def mean(self) -> Tensor:
        """Mean; zero without elements."""
        return self.total / self.num_elements.clamp(min=1)

    def variance(self) -> Tensor:
        """Biased variance (divided by the count).

        E x^2 - (E x)^2 in fp64 has an error of 1e-16 (E x)^2. fp32 inputs have a relative error of 6e-8 themselves, so
        nothing is lost.
        """
        return (self.squares / self.num_elements.clamp(min=1) - self.mean().square()).clamp(min=0)


@torch.no_grad()
def packed_gae(
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor | None,
    values_T: Tensor,
    scores_N: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float,
    kl_coef: float,
    kl_kind: KLKind = "k1",
    token_rewards_T: Tensor | None = None,
    backend: PackedBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Shape rewards by the KL, add the score at the end, and compute generalised advantages and returns, in one step.

    Shapes:  logprobs_T, ref_logprobs_T, values_T, token_rewards_T [T] bf16, fp16, fp32 or fp64; scores_N [N];
             cu_seqlens [N + 1] int32 or int64, 0 first and T last -> advantages_T, returns_T [T] fp32 (fp64 where
             anything is fp64)
    Maths:   algo/gae.py::gae of kl_shaped_rewards (Ziegler et al. 2019, eq. 2; Schulman et al. 2016, eq. 16)
    Note:    advantages are not whitened, see `packed_whiten`. The score of a sequence of length 0 is dropped. With
             kl_coef 0 the log-probs are not read, and the reference's may be None. Token rewards replace the KL: with
             them kl_coef is 0. No gradient flows through.
    Borders: cu_seqlens may be on the CPU, whatever the tokens' device; it is then checked before anything runs. On a
             GPU, where reading it would wait for the device, a device assertion checks it.
    Raises:  ValueError
    """
    if kl_kind not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {kl_kind!r}; the known ones are {', '.join(KL_ESTIMATORS)}")
    if not 0 <= kl_coef < float("inf"):
        raise ValueError(f"kl_coef = {kl_coef}; give a number of 0 or more")
    if kl_coef > 0 and ref_logprobs_T is None:
        raise ValueError(f"kl_coef = {kl_coef} needs ref_logprobs_T, got None; give it, or kl_coef = 0")
    require_fraction("gamma", gamma)
    require_fraction("lam", lam)
    require_column("values_T", values_T)
    ref_logprobs_T = None if kl_coef == 0 else ref_logprobs_T
    if token_rewards_T is not None and kl_coef > 0:
        raise ValueError(f"kl_coef = {kl_coef} beside token_rewards_T; add the KL there, and give kl_coef = 0")
    columns = {"logprobs_T": logprobs_T, "ref_logprobs_T": ref_logprobs_T, "token_rewards_T": token_rewards_T}
    for name, column_T in columns.items():
        if column_T is not None:
            require_column(name, column_T, values_T)
    kernels, sequences = _prepare(cu_seqlens, backend, values_T, logprobs_T, ref_logprobs_T, scores_N, token_rewards_T)
    require_per_sequence("scores_N", scores_N, sequences.num_sequences, values_T)
    numbers = (float(gamma), float(lam), float(kl_coef), kl_kind)
    inputs = GAEInputs(logprobs_T, ref_logprobs_T, values_T, scores_N, *numbers, token_rewards_T)
    return kernels.gae(inputs, sequences)


@torch.no_grad()
def packed_moments(
    x_T: Tensor,
    cu_seqlens: Tensor | None = None,
    mask_T: Tensor | None = None,
    *,
    groups_N: Tensor | None = None,
    backend: PackedBackend = "auto",
) -> Moments:
    """Sum, sum of squares and count of everything, of each sequence (with `cu_seqlens`), or of each group.

    Shapes:  x_T [T], mask_T [T] bool (True: counts; other elements, even NaN, are not read), cu_seqlens as in
             `packed_gae`, groups_N [N] integers, equal for sequences of one group, in any order
             -> 0-d without cu_seqlens, otherwise [N]; with groups each sequence has its group's
    Maths:   in fp64 and in a fixed order: a sequence's tokens, then a group's sequences
    Spec:    algo/whitening.py::moments, group_moments
    Raises:  ValueError, as `packed_gae`; also for an x_T that requires a gradient
    """
    kernels, sequences = _prepare_masked(x_T, cu_seqlens, mask_T, groups_N, backend)
    moments = _moments(kernels, x_T, mask_T, sequences, groups_N)
    return moments if cu_seqlens is not None else Moments(*(part_N[0] for part_N in moments))


def packed_sums(
    x_T: Tensor,
    cu_seqlens: Tensor,
    mask_T: Tensor | None = None,
    *,
    groups_N: Tensor | None = None,
    backend: PackedBackend = "auto",
) -> Tensor:
    """The sum of each sequence's tokens, or of its group's: [N] fp32 (fp64 for fp64). See `packed_moments`."""
    moments = packed_moments(x_T, cu_seqlens, mask_T, groups_N=groups_N, backend=backend)
    return moments.total.to(working_dtype(x_T))


@torch.no_grad()
def packed_whiten(
    x_T: Tensor,
    mask_T: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    groups_N: Tensor | None = None,
    eps: float = 1e-8,
    shift_mean: bool = True,
    moments: Moments | None = None,
    backend: PackedBackend = "auto",
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) with the biased variance, over everything, a sequence, or a group.

    Shapes:     as `packed_moments` -> [T] fp32 (fp64 for fp64), zero outside the mask
    shift_mean: False adds the mean back, so that only the scale changes
    moments:    moments of the whole batch, where x_T is one rank's part; None: x_T is the batch
    Spec:       algo/whitening.py::whiten, with the numbers of `packed_moments`
    Raises:     ValueError, as `packed_moments`
    """
    kernels, sequences = _prepare_masked(x_T, cu_seqlens, mask_T, groups_N, backend)
    if moments is None:
        moments = _moments(kernels, x_T, mask_T, sequences, groups_N)
    mean_N, variance_N = moments.mean().reshape(-1), moments.variance().reshape(-1)
    if len(mean_N) != sequences.num_sequences:
        raise ValueError(
            f"moments are of {len(mean_N)} sequences, but x_T has {sequences.num_sequences}; take them from "
            "packed_moments with the same cu_seqlens and groups_N"
        )
    return kernels.whiten(x_T, mask_T, sequences, mean_N, torch.rsqrt(variance_N + eps), shift_mean)


def _prepare_masked(
    x_T: Tensor, cu_seqlens: Tensor | None, mask_T: Tensor | None, groups_N: Tensor | None, backend: PackedBackend
) -> tuple[ModuleType, CuSeqlens]:
    """Check the arguments of sums and whitening; see `_prepare`."""
    require_column("x_T", x_T)
    if x_T.requires_grad:
        raise ValueError("x_T requires a gradient, but packed sums, means and whitening give none; detach() it")
    if mask_T is not None:
        require_mask("mask_T", mask_T, x_T)
    if cu_seqlens is None:
        if groups_N is not None:
            raise ValueError("groups_N need cu_seqlens, got None; give both, or neither")
        cu_seqlens = torch.tensor([0, len(x_T)])
    kernels, sequences = _prepare(cu_seqlens, backend, x_T)
    if groups_N is not None:
        require_per_sequence("groups_N", groups_N, sequences.num_sequences, x_T, integers=True)
    return kernels, sequences


def _moments(
    kernels: ModuleType, x_T: Tensor, mask_T: Tensor | None, sequences: CuSeqlens, groups_N: Tensor | None
) -> Moments:
    moments_N3 = kernels.moments(x_T, mask_T, sequences)
    if groups_N is not None:
        moments_N3 = kernels.group_moments(moments_N3, groups_N)
    return Moments(*moments_N3.unbind(1))


def _prepare(
    cu_seqlens: Tensor, backend: PackedBackend, x_T: Tensor, *others: Tensor | None
) -> tuple[ModuleType, CuSeqlens]:
    """The backend's module, and the checked cu_seqlens on the tokens' device. Triton's kernels check cu_seqlens on a
    GPU themselves."""
    name = choose_backend(backend, x_T, *others, device=x_T.device, kernels="packed", fallback="torch")
    max_seqlen = require_cu_seqlens(cu_seqlens, x_T, asserted=name != "triton")
    # No copy where dtype, layout and device are right.
    on_device = cu_seqlens.to(x_T.device, torch.int64).contiguous()
    return _module_of(name), CuSeqlens(on_device, len(x_T), max_seqlen)


def _module_of(name: str) -> ModuleType:
    """The module of a backend. All have the same functions, which take checked arguments on one device."""
    if name == "torch":
        return packed_torch
    if name == "reference":
        return packed_reference
    if name == "triton":
        from megarlhf.kernels import packed_triton

        return packed_triton
    raise ValueError(f"backend {name!r} is not known; use auto, triton, torch or reference")
