"""Our packed kernels on this device against fp64: what CI without a GPU cannot see.

A value may be off by FACTOR times what torch in fp32 on the same inputs is off, or by a few roundings of the largest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check import Check, not_refused, results_of
from benchmarks.gpu_timing import Deadline
from megarlhf.kernels import (
    PackedBackend,
    packed_gae,
    packed_sums,
    packed_whiten,
)

FACTOR = 4.0
LENGTHS = ([], [0], [1], [5, 0, 1], [511, 512, 513, 0, 1], [20000, 3], [64] * 300)
_HUGE_BYTES = 40 * 2**30


def run_checks(device: torch.device, deadline: Deadline) -> list[dict[str, Any]]:
    """Name, passed and reason of each; a check that raises has failed."""
    backend: PackedBackend = "triton" if device.type == "cuda" else "torch"
    return results_of(_checks(device, backend), deadline)


def _checks(device: torch.device, backend: PackedBackend) -> Iterator[tuple[str, Check]]:
    dtypes, kinds = (torch.float32, torch.bfloat16, torch.float16), ("k1", "k2", "k3", "abs", None)
    for lengths, dtype, kind in itertools.product(LENGTHS, dtypes, kinds):
        name = f"GAE {kind} {dtype} lengths {lengths[:5]} of {len(lengths)}".replace("torch.", "")
        yield name, partial(_near_truth, partial(_gae, kind), device, backend, lengths, dtype)
    for (name, function), lengths in itertools.product(_OTHERS.items(), LENGTHS):
        about = f"{name} lengths {lengths[:5]} of {len(lengths)}"
        yield about, partial(_near_truth, function, device, backend, lengths, torch.float32)
    for cu_seqlens in ("[1, 5]", "[0, 4, 2, 5]", "[0, 4]", "[0, 6]"):
        yield f"cu_seqlens {cu_seqlens} of 5 tokens is refused", partial(_bad_borders, device, backend, cu_seqlens)
    yield "more than 2^31 tokens", partial(_huge, device, backend)


def _gae(kind: Any, columns: list[Tensor], scores_N: Tensor, cu_seqlens: Tensor, backend: Any) -> list[Tensor]:
    options = {"gamma": 0.99, "lam": 0.95, "kl_coef": 0.1 if kind else 0.0, "kl_kind": kind or "k1"}
    return list(packed_gae(*columns, scores_N, cu_seqlens, backend=backend, **options))


def _sums(columns: list[Tensor], scores_N: Tensor, cu_seqlens: Tensor, backend: Any) -> list[Tensor]:
    groups_N = torch.arange(len(scores_N), device=scores_N.device) % 3
    sums = []
    for mask_T, groups in itertools.product((None, columns[1] > 0), (None, groups_N)):
        sums.append(packed_sums(columns[0], cu_seqlens, mask_T, groups_N=groups, backend=backend))
    return sums


def _whitened(columns: list[Tensor], scores_N: Tensor, cu_seqlens: Tensor, backend: Any) -> list[Tensor]:
    groups_N = torch.arange(len(scores_N), device=scores_N.device) % 3
    ways: list[dict[str, Any]] = [{}, {"cu_seqlens": cu_seqlens}, {"cu_seqlens": cu_seqlens, "groups_N": groups_N}]
    masks = (None, columns[1] > 0)
    return [
        packed_whiten(columns[0], mask_T, eps=1e-2, backend=backend, **way)
        for mask_T, way in itertools.product(masks, ways)
    ]


_OTHERS = {"sums": _sums, "whitening": _whitened}


def _near_truth(
    function: Callable[..., list[Tensor]],
    device: torch.device,
    backend: PackedBackend,
    lengths: list[int],
    dtype: torch.dtype,
) -> str | None:
    """Twice, for the bits; with borders on the device and on the CPU."""
    generator = torch.Generator().manual_seed(len(lengths))
    columns = [torch.randn(sum(lengths), generator=generator).to(dtype) for _ in range(3)]
    scores_N = torch.randn(len(lengths), generator=generator)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    truth = function([column.double() for column in columns], scores_N.double(), cu_seqlens, "torch")
    their = function([column.float() for column in columns], scores_N, cu_seqlens, "torch")
    there = [column.to(device) for column in columns], scores_N.to(device)
    # Where only the device knows the lengths, blocks may be longer: other bits, and as near.
    first, second, by_device = (
        function(*there, borders, backend) for borders in (cu_seqlens, cu_seqlens, cu_seqlens.to(device))
    )
    for number, (want, other, ours) in enumerate(zip(truth, their, first, strict=True)):
        if not torch.equal(ours, second[number]):
            return f"two runs differ in result {number}"
        if want.numel() == 0:
            continue
        allowed = max(float((other.double() - want).abs().max()), 4e-7 * float(want.abs().max()), 1e-9)
        for result in (ours, by_device[number]):
            error = float((result.cpu().double() - want).abs().max())
            if not error <= FACTOR * allowed:
                return f"result {number} is off by {error:.3g}, torch in fp32 by {allowed:.3g}"
    return None


def _bad_borders(device: torch.device, backend: PackedBackend, cu_seqlens: str) -> str | None:
    """In a process of its own: a device assertion ends the use of the device."""
    script = (
        "import torch; from megarlhf.kernels import packed_sums\n"
        f"cu = torch.tensor({cu_seqlens}, device={device.type!r})\n"
        f"print(packed_sums(torch.zeros(5, device={device.type!r}), cu, backend={backend!r}).tolist())"
    )
    return not_refused(script, "device-side assert" if device.type == "cuda" else "cu_seqlens")


def _huge(device: torch.device, backend: PackedBackend) -> str | None:
    """The last sequence stands past 2^31 tokens, and has what it would have alone."""
    if device.type != "cuda" or torch.cuda.mem_get_info()[0] < _HUGE_BYTES:
        return "skipped: needs 40 GiB of free GPU memory"
    cu_seqlens = torch.tensor([0, 2**31 - 5, 2**31 + 100, 2**31 + 1100])
    values_T = torch.zeros(int(cu_seqlens[-1]), dtype=torch.bfloat16, device=device)
    values_T[-2000:] = torch.randn(2000, device=device)
    scores_N = torch.ones(3, device=device)
    options: dict[str, Any] = {"gamma": 0.9, "lam": 0.9, "kl_coef": 0.0}
    advantages_T, _ = packed_gae(values_T, None, values_T, scores_N, cu_seqlens, **options, backend=backend)
    last_T, cu_alone = values_T[-1000:], torch.tensor([0, 1000])
    alone_T, _ = packed_gae(last_T, None, last_T, scores_N[2:], cu_alone, **options, backend="torch")
    error = float((advantages_T[-1000:] - alone_T).abs().max())
    return None if error < 1e-5 else f"the last sequence is off by {error:.3g}"
