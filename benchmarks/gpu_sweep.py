"""Our Triton passes, each alone, cut in several ways: which block and how many warps are the fastest.

The passes are timed as the two functions call them: over whole bf16 rows (logits kernel), and over one fp32 slice of
the vocabulary at a time, taken into statistics that hold something already (linear kernel).

Legend: T tokens, V vocabulary columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import Clock, Deadline
from megarlhf.kernels.statistics import VocabRange, empty_table
from megarlhf.kernels.tiles import LogprobOptions, OutputGradients, Tiles
from megarlhf.kernels.tiles_torch import TorchTiles

BLOCK_COLUMNS = (1024, 2048, 4096, 8192, 16384)
WARPS = (4, 8, 16, 32)
_SLICE = 2048


@dataclass(frozen=True)
class Pass:
    """One pass over one tile: `run(tiles)` does it."""

    name: str
    direction: str
    options: LogprobOptions
    run: Callable[[Tiles], None]


def passes(tokens: int, widths: tuple[int, ...], device: torch.device) -> Iterator[Pass]:
    """Forward and backward over the bf16 rows of each width, then over an fp32 slice; entropy included."""
    for width, dtype in (*((width, torch.bfloat16) for width in widths), (_SLICE, torch.float32)):
        fresh = dtype == torch.bfloat16
        generator = torch.Generator(device).manual_seed(0)
        logits_TV = torch.randn(tokens, width, dtype=dtype, device=device, generator=generator).mul_(2.0)
        labels_T = torch.randint(width, (tokens,), device=device, generator=generator)
        by_2T = torch.randn(2, tokens, device=device, generator=generator)
        columns, options = VocabRange(0, width), LogprobOptions(1.0, -100, width, True)
        table_T4, tiles = empty_table(logits_TV), TorchTiles(options)
        tiles.update(table_T4, logits_TV, labels_T, columns, fresh=True)
        outputs = OutputGradients(tiles.merge(table_T4[None], labels_T), labels_T, *by_2T)
        out_TV = torch.empty_like(logits_TV, dtype=torch.bfloat16)
        name = f"{dtype} [{tokens}, {width}]".removeprefix("torch.")
        yield Pass(name, "forward", options, _update(table_T4, logits_TV, labels_T, columns, fresh))
        yield Pass(name, "backward", options, _gradient(out_TV, logits_TV, columns, outputs))


def _update(
    table_T4: Tensor, logits_TV: Tensor, labels_T: Tensor, columns: VocabRange, fresh: bool
) -> Callable[[Tiles], None]:
    return lambda tiles: tiles.update(table_T4, logits_TV, labels_T, columns, fresh=fresh)


def _gradient(
    out_TV: Tensor, logits_TV: Tensor, columns: VocabRange, outputs: OutputGradients
) -> Callable[[Tiles], None]:
    return lambda tiles: tiles.gradient(out_TV, logits_TV, columns, outputs)


def sweep(clock: Clock, tokens: int, widths: tuple[int, ...], calls: int, deadline: Deadline) -> list[dict[str, Any]]:
    """For each pass the milliseconds of every way that compiles, the fastest first. On a CPU: the torch tiles alone."""
    results = []
    for work in passes(tokens, widths, clock.device):
        tried: list[dict[str, Any]] = []
        for about, make in _ways(work.direction, clock.device):
            if deadline.left() < 5.0:
                break
            try:
                tiles = make(work.options)
                tried.append({**about, "ms": clock.median(partial(work.run, tiles), calls)})
            except Exception as error:  # noqa: BLE001 -- too many registers or too wide a block: not a way, then
                tried.append({**about, "ms": None, "reason": f"{type(error).__name__}: {error}".splitlines()[0]})
        tried.sort(key=lambda way: (way["ms"] is None, way["ms"]))
        results.append(
            {"pass": work.name, "direction": work.direction, "tried": tried, "best": tried[0] if tried else None}
        )
        print(f"sweep {work.name} {work.direction}: best {results[-1]['best']}", flush=True)
    return results


def _ways(direction: str, device: torch.device) -> Iterator[tuple[dict[str, int], Callable[[LogprobOptions], Tiles]]]:
    if device.type != "cuda":
        yield {}, TorchTiles
        return
    from megarlhf.kernels.tiles_triton import Block, TritonTiles

    for columns, warps in itertools.product(BLOCK_COLUMNS, WARPS):
        # At least four columns a thread, and no more than fit its registers.
        if 4 <= columns // (32 * warps) <= 64:
            block = Block(columns=columns, warps=warps)
            yield {"columns": columns, "warps": warps}, partial(TritonTiles, **{direction: block})
