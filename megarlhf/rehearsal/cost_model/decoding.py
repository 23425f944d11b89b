"""Time of a rollout engine by the roofline of decoding, with continuous batching. Pure but for the prices it asks for.

A step of an engine computes one token of every running sequence. Its tensor-parallel ranks read their part of the
weights once and the keys and values of all tokens in the cache, or compute for longer than that. Then they sum their
parts, twice in each layer. The prompt of a sequence is computed when it is admitted. Assumptions:

- A sequence is admitted, in the given order, when the cache has room for its prompt and its whole response. Nothing is
  preempted. (vLLM admits sooner, and may have to preempt.)
- Between two admissions or ends every step takes as long as the one in the middle.
- Prompts of one group of samples are computed once (prefix caching), at the first of them. What earlier weights drew
  of a response, where it is drawn in slices, is computed when its next slice is admitted.
- A conversation with an environment keeps its place: the answer comes at once, its tokens are computed while the others
  wait, and the cache still holds all that was before them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megarlhf.rehearsal.timeline.trace import Operation


class DevicePrice(Protocol):
    """Prices of an engine's work: `pricing.Pricing`."""

    def product_seconds(self, flops: float, nbytes: float, dtype: str) -> float: ...

    def collective_seconds(self, operation: Operation, ranks: tuple[int, ...], nbytes: int, *, host: bool) -> float: ...


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """Size of one engine, for each of its ranks."""

    ranks: tuple[int, ...]
    """Global ranks of the engine: its tensor-parallel group."""
    weight_bytes: int
    """Weights of one rank. In a mixture of experts: the weights that a step reads, which is all of them in a large
    batch."""
    flops_per_token: float
    """FLOPs of one rank and one token without attention: 2 x the parameters that take part."""
    cache_bytes_per_token: int
    """Cache of one rank."""
    num_layers: int
    hidden_size: int
    query_size: int
    """Heads times head_dim on one rank. Attention takes 4 x this for each pair of tokens and layer."""
    dtype: str
    itemsize: int


StretchLengths = tuple[int, ...]
"""Tokens after a prompt: numbers of sampled and observed ones in turn. A response is one sampled stretch."""


@dataclass(frozen=True)
class Sequences:
    """Sequences to generate: tokens of each prompt, and sampled tokens after it."""

    prompts: Sequence[int]
    """Tokens before those that are drawn now: the prompt's, and what earlier weights drew of the response."""
    responses: Sequence[int]
    conversations: Sequence[StretchLengths] = ()
    """Stretches of each sequence; empty where each is one response."""
    computed: Sequence[int] = ()
    """Last tokens of each prompt that have to be computed, since the cache does not have them; empty: all tokens."""

    @classmethod
    def of_stretches(
        cls, prompts: Sequence[int], stretches: Sequence[StretchLengths], computed: Sequence[int] = ()
    ) -> Sequences:
        """Sequences of which some may have several stretches."""
        talks = any(len(each) > 1 for each in stretches)
        return cls(prompts, [sum(each[::2]) for each in stretches], stretches if talks else (), computed)

    def __iter__(self) -> Iterator[Waiting]:
        stretches = self.conversations or [(tokens,) for tokens in self.responses]
        return map(Waiting, self.prompts, stretches, self.computed or self.prompts)

    @property
    def num_observed(self) -> int:
        """Observed tokens of all sequences."""
        return sum(sum(each[1::2]) for each in self.conversations)


class Waiting(NamedTuple):
    """A sequence that an engine will admit."""

    prompt: int
    stretches: StretchLengths
    computed: int
    """Last tokens of the prompt that have to be computed."""

    @property
    def length(self) -> int:
        """Tokens of its prompt and all stretches."""
        return self.prompt + sum(self.stretches)


@dataclass(frozen=True)
class RolloutWork:
    """Sequences for all engines of the job."""

    engines: Sequence[Sequences]
    """Sequences with which each engine begins."""
    queue: Sequence[Sequences] = ()
    """Pieces of one prompt each. An engine that has room takes the next one (`rollout/prompt_queue.py`)."""
    most: int = 0
    """Number of unfinished sequences that an engine does not exceed by a piece of the queue."""


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of one engine until it has all of its responses."""

    prefill: float
    decode: float
    """Device time of the steps, with their collectives."""
    overhead: float
    """`engine_step` of the hardware file, once a step."""
    steps: int
    most_running: int
    """Largest number of sequences at once."""
    waited: float = 0.0
    """Part of the seconds in which a sequence waits for room in the cache."""

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode + self.overhead


def decode_seconds(
    price: DevicePrice,
    shape: EngineShape,
    work: RolloutWork,
    cache_bytes: int,
    *,
    step_overhead: float = 0.0,
    max_running: int = 1024,
) -> tuple[list[RolloutTime], list[int]]:
    """Times of several engines until each has its responses, and the engine that takes each piece of the queue: of
    those with room, the one that is behind.

    cache_bytes: memory of one rank's cache.
    Raises: ValueError for a sequence that does not fit the cache alone.
    """
    capacity = cache_bytes // shape.cache_bytes_per_token
    longest = max((each.length for piece in (*work.engines, *work.queue) for each in piece), default=0)
    if longest > capacity:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit the cache of {capacity} tokens ({cache_bytes} bytes, "
            f"{shape.cache_bytes_per_token} a token); raise the cache or rollout.parallel.tp"
        )
    runs = [_EngineRun(price, shape, capacity, max_running, step_overhead) for _ in work.engines]
    for run, sequences in zip(runs, work.engines, strict=True):
        run.waiting.extend(sequences)
    waiting, owners = deque(work.queue), list[int]()
    clock = [(run.seconds, engine) for engine, run in enumerate(runs)]
    while clock:
        _, engine = clock[0]
        run = runs[engine]
        run.admit_waiting()
        unfinished = len(run.ends)
        has_room = not run.waiting and unfinished < max_running
        if waiting and has_room and (not unfinished or unfinished + len(waiting[0].responses) <= work.most):
            piece = waiting.popleft()
            run.waiting.extend(piece)
            owners.append(engine)
        elif run.ends:
            run.to_next_end()
        else:
            heapq.heappop(clock)
            continue
        heapq.heapreplace(clock, (run.seconds, engine))
    return [run.time() for run in runs], owners


def decode_step_seconds(price: DevicePrice, shape: EngineShape, running: int, cached_tokens: float) -> float:
    """Device seconds of one step: `running` sequences with `cached_tokens` in the cache together.

    max((weights + cache) / bandwidth, (2 P running + 4 layers query cached) / peak) + 2 layers all_reduce
    """
    flops = running * shape.flops_per_token + 4.0 * shape.num_layers * shape.query_size * cached_tokens
    nbytes = shape.weight_bytes + cached_tokens * shape.cache_bytes_per_token
    return price.product_seconds(flops, nbytes, shape.dtype) + _all_reduces(price, shape, running)


def prefill_seconds(price: DevicePrice, shape: EngineShape, tokens: int, before: int = 0) -> float:
    """Device seconds of a prompt alone, or of tokens after `before` others, whose keys and values are in the cache: 2 P
    tokens, and causal attention over tokens x before and half of tokens x tokens pairs."""
    flops = tokens * shape.flops_per_token + 2.0 * shape.num_layers * shape.query_size * tokens * (tokens + 2 * before)
    return price.product_seconds(flops, 0.0, shape.dtype) + _all_reduces(price, shape, tokens)


def _all_reduces(price: DevicePrice, shape: EngineShape, tokens: int) -> float:
    if len(shape.ranks) == 1:
        return 0.0
    nbytes = tokens * shape.hidden_size * shape.itemsize
    return 2 * shape.num_layers * price.collective_seconds("all_reduce", shape.ranks, nbytes, host=False)


class _EngineRun:
    """One engine while it generates. Time is counted in steps."""

    def __init__(
        self, price: DevicePrice, shape: EngineShape, capacity: int, max_running: int, step_overhead: float
    ) -> None:
        self.price, self.shape, self.max_running, self.step_overhead = price, shape, max_running, step_overhead
        self.waiting: deque[Waiting] = deque()
        self.free = capacity
        self.now = 0
        self.cached = 0
        """Tokens in the cache now."""
        self.ends: list[tuple[int, int, StretchLengths]] = []
        """End of each sampled stretch: (step, tokens of the sequence by then, stretches that follow), a heap."""
        self.prefill = self.decode = self.waited = 0.0
        self.most_running = 0

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode + self.now * self.step_overhead

    def time(self) -> RolloutTime:
        overhead = self.now * self.step_overhead
        return RolloutTime(self.prefill, self.decode, overhead, self.now, self.most_running, self.waited)

    @property
    def waits_for_cache(self) -> bool:
        return bool(self.waiting) and self.waiting[0].length > self.free

    def admit_waiting(self) -> None:
        """Admit sequences in their order, as long as there is room."""
        while self.waiting and not self.waits_for_cache and len(self.ends) < self.max_running:
            self.admit(self.waiting.popleft())

    def admit(self, sequence: Waiting) -> None:
        prompt, (first, *following), computed = sequence
        self.free -= sequence.length
        self.cached += prompt
        heapq.heappush(self.ends, (self.now + first, prompt + first, tuple(following)))
        self.most_running = max(self.most_running, len(self.ends))
        if computed:
            self.prefill += prefill_seconds(self.price, self.shape, computed, before=prompt - computed)

    def to_next_end(self) -> None:
        """Run steps until the next sampled stretch is complete. What is observed then is computed at once."""
        end, tokens, following = heapq.heappop(self.ends)
        steps, running = end - self.now, len(self.ends) + 1
        if steps:
            middle = self.cached + running * (steps + 1) / 2
            seconds = steps * decode_step_seconds(self.price, self.shape, running, middle)
            self.decode += seconds
            self.waited += (seconds + steps * self.step_overhead) * self.waits_for_cache
        self.now = end
        self.cached += steps * running
        if not following:
            self.cached -= tokens
            self.free += tokens
            return
        observed, sampled, *later = following
        self.prefill += prefill_seconds(self.price, self.shape, observed, before=tokens)
        self.cached += observed
        heapq.heappush(self.ends, (end + sampled, tokens + observed + sampled, tuple(later)))
