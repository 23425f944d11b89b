"""Time of a rollout engine by the roofline of decoding, with continuous batching. Pure but for the prices it asks.

A step of an engine computes one token of every running sequence. Its tensor-parallel ranks read their part of the
weights once and the keys and values of all tokens in the cache, or compute for longer than that; then they add up
their parts twice in a layer. The prompt of a sequence is computed when it is admitted. What is assumed:

- A sequence is admitted, in the order given, when the cache has room for its prompt and its whole response: nothing is
  preempted. (vLLM admits sooner, and may have to preempt.)
- Between two admissions or ends the step's time is that of the stretch's middle.
- Prompts of one group of samples are computed once (prefix caching), at the first of them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from megarlhf.rehearsal.timeline.trace import Operation


class DevicePrice(Protocol):
    """What `Pricing` offers to an engine."""

    def product_seconds(self, flops: float, nbytes: float, dtype: str) -> float: ...

    def collective_seconds(self, operation: Operation, ranks: tuple[int, ...], nbytes: int, *, host: bool) -> float: ...


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """What one engine holds, by rank."""

    ranks: tuple[int, ...]
    """Global ranks of the engine: its tensor-parallel group."""
    weight_bytes: int
    """Of one rank; of a mixture of experts those that a step reads, which is all of them in a large batch."""
    flops_per_token: float
    """Of one rank and one token, without attention: 2 x the parameters that take part in it."""
    cache_bytes_per_token: int
    """Of one rank."""
    num_layers: int
    hidden_size: int
    query_size: int
    """Heads times head_dim on one rank; attention's FLOPs are 4 x this for each pair of tokens and layer."""
    dtype: str
    itemsize: int


@dataclass(frozen=True)
class Sequences:
    """What has to be generated together; tokens of each prompt and response."""

    prompts: Sequence[int]
    responses: Sequence[int]

    def pairs(self) -> Iterator[tuple[int, int]]:
        return zip(self.prompts, self.responses, strict=True)


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of one engine, and what they consist of."""

    prefill: float
    decode: float
    """Device time of the steps, with their collectives."""
    overhead: float
    """`engine_step` of the hardware file, once a step."""
    steps: int
    most_running: int
    """Sequences at once, at most."""
    mean_running: float
    """Of the steps."""

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode + self.overhead


def rollout_seconds(
    price: DevicePrice,
    shape: EngineShape,
    prompts: Sequence[int],
    responses: Sequence[int],
    cache_bytes: int,
    *,
    step_overhead: float = 0.0,
    max_running: int = 1024,
    samples_per_prompt: int = 1,
) -> RolloutTime:
    """Time until an engine has all responses.

    prompts, responses: tokens, by sequence; a prompt's samples stand side by side.
    cache_bytes:        of one rank.
    Raises: ValueError for a sequence that does not fit the cache alone, or lists of different length.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses; give one of each for a sequence")
    work = Sequences(prompts, responses)
    options = {"step_overhead": step_overhead, "max_running": max_running, "samples_per_prompt": samples_per_prompt}
    (time,), _ = pulled_seconds(price, shape, [work], [], cache_bytes, most=0, **options)  # type: ignore[arg-type]
    return time


def pulled_seconds(
    price: DevicePrice,
    shape: EngineShape,
    first: Sequence[Sequences],
    queue: Sequence[Sequences],
    cache_bytes: int,
    *,
    most: int,
    step_overhead: float = 0.0,
    max_running: int = 1024,
    samples_per_prompt: int = 1,
) -> tuple[list[RolloutTime], list[int]]:
    """Times of several engines until each has its responses, and which engine takes each piece of a queue.

    first: what each begins with. queue: sequences of one prompt each; an engine that has room for more takes the next
    one, but not beyond `most` unfinished sequences (`rollout/prompt_queue.py`), and the one that is behind in time
    comes first. Raises: ValueError for a sequence that does not fit the cache alone.
    """
    capacity = cache_bytes // shape.cache_bytes_per_token
    longest = max((p + r for work in (*first, *queue) for p, r in work.pairs()), default=0)
    if longest > capacity:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit the cache of {capacity} tokens ({cache_bytes} bytes, "
            f"{shape.cache_bytes_per_token} a token); raise the cache or rollout.parallel.tp"
        )
    runs = [_Run(price, shape, capacity, max_running, step_overhead) for _ in first]
    for run, work in zip(runs, first, strict=True):
        run.add(work, samples_per_prompt)
    left, owners = deque(queue), list[int]()
    clock = [(run.seconds, number) for number, run in enumerate(runs)]
    while clock:
        _, number = clock[0]
        run = runs[number]
        run.admit_waiting()
        unfinished = len(run.ends)
        has_room = not run.waiting and unfinished < max_running
        if left and has_room and (not unfinished or unfinished + len(left[0].responses) <= most):
            piece = left.popleft()
            run.add(piece, len(piece.responses))
            owners.append(number)
        elif run.ends:
            run.to_next_end()
        else:
            heapq.heappop(clock)
            continue
        heapq.heapreplace(clock, (run.seconds, number))
    return [run.time() for run in runs], owners


def stated_seconds(responses: Sequence[int], tokens_per_second: float) -> float:
    """Where a speed is stated instead: tokens of the responses by tokens per second of the engine."""
    if not tokens_per_second > 0:
        raise ValueError(f"tokens_per_second = {tokens_per_second}; give a number above 0")
    return sum(responses) / tokens_per_second


def decode_step_seconds(price: DevicePrice, shape: EngineShape, running: int, cached_tokens: float) -> float:
    """Device seconds of one step: `running` sequences with `cached_tokens` in the cache together.

    max((weights + cache) / bandwidth, (2 P running + 4 layers query cached) / peak) + 2 layers all_reduce
    """
    flops = running * shape.flops_per_token + 4.0 * shape.num_layers * shape.query_size * cached_tokens
    nbytes = shape.weight_bytes + cached_tokens * shape.cache_bytes_per_token
    return price.product_seconds(flops, nbytes, shape.dtype) + _all_reduces(price, shape, running)


def prefill_seconds(price: DevicePrice, shape: EngineShape, prompt: int) -> float:
    """Device seconds of one prompt alone: 2 P tokens, and causal attention over half of all pairs."""
    flops = prompt * shape.flops_per_token + 2.0 * shape.num_layers * shape.query_size * prompt * prompt
    return price.product_seconds(flops, 0.0, shape.dtype) + _all_reduces(price, shape, prompt)


def _all_reduces(price: DevicePrice, shape: EngineShape, tokens: int) -> float:
    if len(shape.ranks) == 1:
        return 0.0
    nbytes = tokens * shape.hidden_size * shape.itemsize
    return 2 * shape.num_layers * price.collective_seconds("all_reduce", shape.ranks, nbytes, host=False)


class _Run:
    """An engine on its way; time is counted in steps."""

    def __init__(
        self, price: DevicePrice, shape: EngineShape, capacity: int, max_running: int, step_overhead: float
    ) -> None:
        self.price, self.shape, self.max_running, self.step_overhead = price, shape, max_running, step_overhead
        self.waiting: deque[tuple[int, int, bool]] = deque()
        """Prompt, response, and whether the prompt has to be computed."""
        self.free = capacity
        self.now = 0
        self.cached = 0
        """Tokens in the cache now."""
        self.ends: list[tuple[int, int]] = []
        """(step, tokens of the sequence by then), a heap."""
        self.prefill = self.decode = 0.0
        self.tokens = self.most = 0

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode + self.now * self.step_overhead

    def time(self) -> RolloutTime:
        mean = self.tokens / self.now if self.now else 0.0
        return RolloutTime(self.prefill, self.decode, self.now * self.step_overhead, self.now, self.most, mean)

    def add(self, work: Sequences, samples_per_prompt: int) -> None:
        for n, (prompt, response) in enumerate(work.pairs()):
            self.waiting.append((prompt, response, n % samples_per_prompt == 0))

    def admit_waiting(self) -> None:
        """Those for which there is room, in their order."""
        while self.waiting:
            prompt, response, computes_prompt = self.waiting[0]
            if prompt + response > self.free or len(self.ends) >= self.max_running:
                return
            self.waiting.popleft()
            self.admit(prompt, response, computes_prompt=computes_prompt)

    def admit(self, prompt: int, response: int, *, computes_prompt: bool) -> None:
        self.free -= prompt + response
        self.cached += prompt
        heapq.heappush(self.ends, (self.now + response, prompt + response))
        self.most = max(self.most, len(self.ends))
        if computes_prompt:
            self.prefill += prefill_seconds(self.price, self.shape, prompt)

    def to_next_end(self) -> None:
        """Steps until the next sequence is through."""
        end, tokens = heapq.heappop(self.ends)
        steps, running = end - self.now, len(self.ends) + 1
        if steps:
            middle = self.cached + running * (steps + 1) / 2
            self.decode += steps * decode_step_seconds(self.price, self.shape, running, middle)
        self.now = end
        self.tokens += steps * running
        self.cached += steps * running - tokens
        self.free += tokens
