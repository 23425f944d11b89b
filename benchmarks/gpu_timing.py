"""Time and memory of one call on a GPU (and, to rehearse, on a CPU); what the machine could do at best; floors.

Legend: T tokens, H hidden, V vocabulary columns of one rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

_SLEEP_CYCLES = 3_000_000
"""About two milliseconds: the host has put the whole call into the stream before the device begins with it."""


@dataclass
class Deadline:
    """Seconds that are left to the whole run."""

    seconds: float
    start: float = 0.0

    def __post_init__(self) -> None:
        self.start = self.start or time.monotonic()

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.start)


class Clock:
    """Milliseconds of single calls, between CUDA events; `perf_counter` on a CPU.

    Before each call the L2 cache is overwritten and the device put to sleep, so that neither earlier inputs nor the
    host's launches are in the figure; a call that waits for the device (`.item()`) still pays for that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush = torch.empty(2**28 if device.type == "cuda" else 2**20, dtype=torch.int8, device=device)

    def __call__(self, call: Callable[[], object], prepare: Callable[[], object] | None = None) -> float:
        if prepare is not None:
            prepare()
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        self._flush.zero_()
        before.record()
        kept = call()
        after.record()
        after.synchronize()
        del kept
        return float(before.elapsed_time(after))

    def median(self, call: Callable[[], object], calls: int) -> float:
        """Of several calls after one that warms up."""
        self(call)
        return statistics.median(self(call) for _ in range(calls))


def spread(values: Iterable[float]) -> dict[str, float]:
    """Of the rounds of one candidate."""
    listed = list(values)
    return {"median": statistics.median(listed), "min": min(listed), "max": max(listed)}


def peak_extra_bytes(call: Callable[[], Any], inputs: Iterable[Tensor], device: torch.device) -> int | None:
    """The most memory a call held beside its inputs and its results; None on a CPU, where torch does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    there = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    # A result that lies in an input, or in another result, is no memory of its own.
    new = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in flat(results)}
    made = sum(size for pointer, size in new.items() if pointer not in there)
    return torch.cuda.max_memory_allocated() - before - made


def flat(results: Any) -> Iterable[Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, (tuple, list)):
        for result in results:
            yield from flat(result)


@dataclass(frozen=True)
class Ceilings:
    """The best this device did in this run."""

    copy_bytes_per_s: float
    """Bytes read and written by a device-to-device copy."""
    matmul_flops_per_s: float
    """A square bf16 product of random matrices."""


def measure_ceilings(clock: Clock, calls: int) -> Ceilings:
    on_gpu = clock.device.type == "cuda"
    num_bytes, edge = (2**31, 8192) if on_gpu else (2**22, 128)
    source = torch.ones(num_bytes, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    copy_ms = clock.median(partial(target.copy_, source), calls)
    del source, target
    left, right = (torch.randn(edge, edge, device=clock.device).to(torch.bfloat16) for _ in range(2))
    matmul_ms = clock.median(partial(torch.mm, left, right), calls)
    return Ceilings(2e3 * num_bytes / copy_ms, 2e3 * edge**3 / matmul_ms)


def logits_floor_ms(tokens: int, columns: int, mode: str, ceilings: Ceilings, itemsize: int = 2) -> float:
    """Forward reads the logits once; forward and backward read them twice and write their gradient once."""
    passes = {"forward": 1, "forward+backward": 3}[mode]
    return 1e3 * passes * tokens * columns * itemsize / ceilings.copy_bytes_per_s


def linear_floor_ms(tokens: int, hidden: int, columns: int, products: int, ceilings: Ceilings) -> float:
    """`products` times 2THV: 1 forward; with the backward 3 where the logits are kept, 4 where they are made again."""
    return 2e3 * products * tokens * hidden * columns / ceilings.matmul_flops_per_s
