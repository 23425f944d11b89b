"""Measurement of one device alone: products, passes over memory, attention.

A time is the least of several samples, on a clock that stands still while the scheduler runs others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

from megarlhf.rehearsal.calibrate.stopwatch import undisturbed_clock
from megarlhf.rehearsal.cost_model.hardware import AttentionPass, Dtype, MemoryClass, MemoryPass, Product
from megarlhf.runtime import synchronize

DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WARM_UP = 2
LEAST_SAMPLES = 3
ROW = 256
"""Elements of a row that is read by index."""
RING = 24
"""Largest number of tensors of one size that are used in turn."""
RING_BYTES = 128 << 20
"""Approximate bytes of all of them together."""
Progress = Callable[[str], None]
"""Callback with the name of a measurement, once for each figure."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of what is measured, and durations."""

    m: tuple[int, ...]
    k: tuple[int, ...]
    n: tuple[int, ...]
    batches: tuple[int, ...]
    most_flops: float
    """Bound on a product or an attention."""
    most_numel: int
    """Bound on the elements of a product's three matrices together."""
    nbytes: tuple[int, ...]
    """Sizes of one tensor in a pass over memory."""
    heads: tuple[int, ...]
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    message_bytes: tuple[int, ...]
    sample_seconds: float
    """Least duration of a sample, which repeats its measurement."""
    samples: int


CPU = Sizes(
    m=(16, 64, 256, 1024),
    k=(32, 128, 512, 2048),
    n=(32, 128, 512, 2048),
    batches=(1,),
    most_flops=1.2e10,
    most_numel=1 << 28,
    nbytes=(1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25),
    heads=(1, 8),
    lengths=(32, 128, 512),
    head_dims=(32, 64, 128),
    message_bytes=(4, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26),
    sample_seconds=2e-3,
    samples=7,
)
GPU = Sizes(
    m=(64, 256, 1024, 4096, 16384),
    k=(128, 512, 2048, 8192, 28672),
    n=(128, 512, 2048, 8192, 28672),
    batches=(1, 16),
    most_flops=1.5e13,
    most_numel=1 << 30,
    nbytes=tuple(1 << power for power in range(10, 32, 3)),
    heads=(1, 8, 64),
    lengths=(128, 1024, 8192),
    head_dims=(64, 128),
    message_bytes=tuple(1 << power for power in range(2, 31, 4)),
    sample_seconds=2e-3,
    samples=5,
)
QUICK = Sizes(
    m=(16, 64),
    k=(32,),
    n=(32, 64),
    batches=(1,),
    most_flops=1e9,
    most_numel=1 << 28,
    nbytes=(1 << 10, 1 << 14),
    heads=(2,),
    lengths=(32,),
    head_dims=(32,),
    message_bytes=(4, 1 << 12),
    sample_seconds=1e-4,
    samples=LEAST_SAMPLES,
)


def seconds_of(function: Callable[[], object], device: torch.device, sizes: Sizes) -> float:
    """Seconds of one call."""
    for _ in range(WARM_UP):
        function()
    synchronize(device)
    began = perf_counter()
    function()
    synchronize(device)
    calls = max(1, int(sizes.sample_seconds / max(1e-9, perf_counter() - began)))
    samples = []
    for _ in range(sizes.samples):
        began = undisturbed_clock()
        for _ in range(calls):
            function()
        synchronize(device)
        samples.append((undisturbed_clock() - began) / calls)
    return max(1e-9, min(samples))


def num_figures(sizes: Sizes) -> int:
    """Number of calls of `progress` in the functions below, all together."""
    passes = len(sizes.nbytes) + len(list(_attention_sizes(sizes)))
    return len(DTYPES) * (len(list(_product_sizes(sizes))) + passes)


def _product_sizes(sizes: Sizes) -> Iterator[tuple[int, int, int, int]]:
    for batch, m, k, n in itertools.product(sizes.batches, sizes.m, sizes.k, sizes.n):
        numel = batch * (m * k + k * n + m * n)
        if 2.0 * batch * m * k * n <= sizes.most_flops and numel <= sizes.most_numel:
            yield batch, m, k, n


def _attention_sizes(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    for heads, length, head_dim in itertools.product(sizes.heads, sizes.lengths, sizes.head_dims):
        if 4.0 * heads * length * length * head_dim <= sizes.most_flops:
            yield heads, length, head_dim


def in_turn(functions: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A function that calls one of these after the other."""
    calls = itertools.cycle(functions)
    return lambda: next(calls)()


def copies_of(nbytes: int) -> int:
    """Number of tensors of this size that are used in turn. An operation of training reads what another one wrote some
    time ago; a cache that holds a single tensor would help here and not there."""
    return max(2, min(RING, RING_BYTES // max(1, nbytes)))


def measure_products(device: torch.device, sizes: Sizes, progress: Progress) -> list[Product]:
    """Time of a product, as the mean of its forward and its two backward forms, which differ in what is transposed."""
    rows = []
    for (name, dtype), (batch, m, k, n) in itertools.product(DTYPES.items(), _product_sizes(sizes)):
        progress(f"products, {name}")
        copies = range(copies_of(batch * (m * k + k * n + m * n) * dtype.itemsize))
        forms: list[list[Callable[[], object]]] = [[], [], []]
        for _ in copies:
            left, weight, out = (
                torch.randn(batch, *shape, device=device).to(dtype) for shape in ((m, k), (n, k), (m, n))
            )
            turned, plain = left.view(batch, k, m).transpose(-1, -2), weight.view(batch, k, n)
            for form, (a, b) in zip(
                forms, ((left, weight.transpose(-1, -2)), (left, plain), (turned, plain)), strict=True
            ):
                a, b, c = (a[0], b[0], out[0]) if batch == 1 else (a, b, out)
                form.append(lambda a=a, b=b, c=c: torch.matmul(a, b, out=c))  # type: ignore[misc]
        seconds = [seconds_of(in_turn(form), device, sizes) for form in forms]
        rows.append(Product(name, batch, m, k, n, sum(seconds) / len(seconds)))
    return rows


def measure_memory(device: torch.device, sizes: Sizes, progress: Progress) -> list[MemoryPass]:
    """Times of passes over tensors of several sizes."""
    rows = []
    for (name, dtype), nbytes in itertools.product(DTYPES.items(), sizes.nbytes):
        progress(f"passes over memory, {name}")
        passes: dict[tuple[MemoryClass, int], list[Callable[[], object]]] = {}
        for _ in range(copies_of(3 * nbytes)):
            for kind, touched, function in _passes(device, dtype, nbytes):
                passes.setdefault((kind, touched), []).append(function)
        for (kind, touched), functions in passes.items():
            rows.append(MemoryPass(kind, name, touched, seconds_of(in_turn(functions), device, sizes)))
    return rows


def _passes(
    device: torch.device, dtype: torch.dtype, nbytes: int
) -> Iterator[tuple[MemoryClass, int, Callable[[], object]]]:
    """(kind, bytes touched, function) for tensors of `nbytes`."""
    numel = nbytes // dtype.itemsize
    first, second, out = (torch.randn(numel, device=device).to(dtype) for _ in range(3))
    source = first.to(torch.bfloat16 if dtype == torch.float32 else torch.float32)
    rows = first.view(-1, min(ROW, numel))
    few = torch.empty(rows.size(0), dtype=dtype, device=device)
    order = torch.randperm(rows.size(0), device=device)
    yield "copy", 3 * nbytes, lambda: torch.add(first, second, out=out)
    yield "cast", nbytes + numel * source.element_size(), lambda: out.copy_(source)
    yield "math", 2 * nbytes, lambda: torch.ops.aten.silu.out(first, out=out)
    yield "fill", nbytes, lambda: out.zero_()
    yield "norm", nbytes, lambda: torch.linalg.vector_norm(first)
    yield "largest", nbytes, lambda: torch.linalg.vector_norm(first, ord=math.inf)
    yield "reduce", nbytes, lambda: torch.mean(rows, -1, out=few)
    yield "index", 2 * nbytes, lambda: torch.index_select(rows, 0, order, out=out.view_as(rows))


def measure_attention(device: torch.device, sizes: Sizes, progress: Progress) -> list[AttentionPass]:
    """Times of causal attention, forward and backward."""
    rows = []
    for (name, dtype), (heads, length, head_dim) in itertools.product(DTYPES.items(), _attention_sizes(sizes)):
        progress(f"attention, {name}")
        passes = [
            _attention(
                [torch.randn(1, heads, length, head_dim, device=device).to(dtype).requires_grad_() for _ in range(3)]
            )
            for _ in range(copies_of(4 * heads * length * head_dim * dtype.itemsize))
        ]
        forward = seconds_of(in_turn([forward for forward, _ in passes]), device, sizes)
        backward = seconds_of(in_turn([backward for _, backward in passes]), device, sizes)
        rows.append(AttentionPass(name, "forward", heads, length, head_dim, forward))
        rows.append(AttentionPass(name, "backward", heads, length, head_dim, backward))
    return rows


def _attention(inputs: Sequence[Tensor]) -> tuple[Callable[[], object], Callable[[], object]]:
    query, key, value = inputs
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    gradient = torch.randn_like(out)

    def forward() -> object:
        with torch.no_grad():
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def backward() -> object:
        return torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

    return forward, backward


def peak_of(products: Sequence[Product], dtype: str) -> float:
    """Floating-point operations per second of the fastest product."""
    return max(2.0 * p.batch * p.m * p.k * p.n / p.seconds for p in products if p.dtype == dtype)


def bandwidth_of(memory: Sequence[MemoryPass]) -> float:
    """Bytes per second of the largest copy, which no cache holds."""
    largest = max((row for row in memory if row.kind == "copy"), key=lambda row: row.nbytes)
    return largest.nbytes / largest.seconds
