"""Time of the rollout engines for the responses of a step, by a stated speed or by the roofline of decoding."""

from __future__ import annotations

from typing import Protocol

import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.config import RolloutConfig
from megarlhf.parallel.packing.partition import forward_cost
from megarlhf.rehearsal.cost_model.decoding import EngineShape, RolloutTime, RolloutWork
from megarlhf.rehearsal.result import RolloutRow

MAX_NUM_SEQS = 1024
"""Sequences that vLLM runs at once unless `rollout.vllm.args` sets it: its default on a GPU of 70 GiB or more
(vllm/engine/arg_utils.py)."""


class DecodePrice(Protocol):
    """Prices of rollouts: `pricing.Pricing`."""

    def decode_seconds(
        self, shape: EngineShape, work: RolloutWork, cache_bytes: int, *, max_running: int
    ) -> tuple[list[RolloutTime], list[int]]: ...


def max_sequences(rollout: RolloutConfig) -> int:
    """Sequences that an engine runs at once."""
    return int(rollout.vllm.args.get("max_num_seqs", MAX_NUM_SEQS))


def shape_of(arch: Architecture, tp: int, first_rank: int, dtype: torch.dtype, weight_bytes: int) -> EngineShape:
    """Size of an engine of `tp` ranks, starting at `first_rank`."""
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
    work: RolloutWork,
    shape: EngineShape,
    cache_bytes: int,
    price: DecodePrice,
    *,
    tokens_per_second: float | None,
    max_running: int,
) -> tuple[RolloutRow, list[int]]:
    """Time of the slowest and the fastest engine, and the engine that takes each piece of the queue.

    `tokens_per_second`: response tokens of one engine, stated by the user; None: by the roofline.
    """
    if tokens_per_second is not None:
        tokens, owners = stated_tokens(work)
        seconds, most_running, waited = [count / tokens_per_second for count in tokens], 0, 0.0
    else:
        times, owners = price.decode_seconds(shape, work, cache_bytes, max_running=max_running)
        seconds, most_running = [time.seconds for time in times], max((time.most_running for time in times), default=0)
        waited = max((time.waited for time in times), default=0.0)
    pieces = (*work.engines, *work.queue)
    rollout = RolloutRow(
        slowest=max(seconds, default=0.0),
        fastest=min(seconds, default=0.0),
        tokens=sum(sum(piece.responses) for piece in pieces),
        most_running=most_running,
        observed=sum(piece.num_observed for piece in pieces),
        computed=sum(each.computed for piece in pieces for each in piece),
        waited=waited,
    )
    return rollout, owners


def stated_tokens(work: RolloutWork) -> tuple[list[int], list[int]]:
    """Response tokens of each engine at equal speeds, and the engine that takes each piece of the queue."""
    tokens, owners = [sum(engine.responses) for engine in work.engines], []
    for piece in work.queue:
        owners.append(min(range(len(tokens)), key=tokens.__getitem__))
        tokens[owners[-1]] += sum(piece.responses)
    return tokens, owners
