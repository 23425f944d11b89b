"""How long the rollout engines take for a step's responses, by a stated speed or by the roofline of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.parallel.packing import forward_cost
from megarlhf.rehearsal.decoding import EngineShape, RolloutTime


class DecodePrice(Protocol):
    """What prices a rollout: `pricing.Pricing`."""

    def decode_seconds(
        self,
        shape: EngineShape,
        prompts: Sequence[int],
        responses: Sequence[int],
        cache_bytes: int,
        *,
        max_running: int = 1024,
        samples_per_prompt: int = 1,
    ) -> RolloutTime: ...


@dataclass(frozen=True)
class EngineWork:
    """What one engine has to generate."""

    prompts: Sequence[int]
    """Tokens of each."""
    responses: Sequence[int]


@dataclass(frozen=True)
class RolloutEstimate:
    """Of all engines of the job."""

    slowest: float
    """Seconds; every rank waits for it."""
    fastest: float
    tokens: int
    most_running: int
    """Sequences at once on one engine; 0 where a speed was stated."""


def shape_of(arch: Architecture, tp: int, first_rank: int, dtype: torch.dtype, weight_bytes: int) -> EngineShape:
    """An engine of `tp` ranks from `first_rank` on."""
    groups = max(1, arch.num_kv_heads // tp)
    head = 2 * arch.vocab_size * arch.hidden_size
    return EngineShape(
        ranks=tuple(range(first_rank, first_rank + tp)),
        weight_bytes=weight_bytes,
        flops_per_token=(forward_cost(arch).per_token + head) / tp,
        cache_bytes_per_token=2 * arch.num_layers * groups * arch.head_dim * dtype.itemsize,
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        query_size=max(1, arch.num_heads // tp) * arch.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
    )


def estimate(
    engines: Sequence[EngineWork],
    shape: EngineShape,
    cache_bytes: int,
    price: DecodePrice,
    *,
    tokens_per_second: float | None,
    max_running: int,
    samples_per_prompt: int,
) -> RolloutEstimate:
    """`tokens_per_second`: of responses, of one engine, stated by the user; None: by the roofline."""
    seconds, running = [], 0
    for work in engines:
        if tokens_per_second is not None:
            seconds.append(sum(work.responses) / tokens_per_second)
            continue
        time = price.decode_seconds(
            shape,
            work.prompts,
            work.responses,
            cache_bytes,
            max_running=max_running,
            samples_per_prompt=samples_per_prompt,
        )
        seconds.append(time.seconds)
        running = max(running, time.most_running)
    tokens = sum(sum(work.responses) for work in engines)
    return RolloutEstimate(max(seconds, default=0.0), min(seconds, default=0.0), tokens, running)
