"""The rollout engine of a rehearsal: vLLM's memory, the resharder of a real run, and responses of given lengths.

Weights are placed as the table says that vLLM has them (`architectures/`), the cache is as large as vLLM makes it, and
updates and certificates are those of the real engine. Nothing is generated: lengths are drawn from a distribution, and
the time of a rollout is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import vllm_placements
from megarlhf.config import RolloutConfig
from megarlhf.layout import split_evenly
from megarlhf.models.build import ModelShard
from megarlhf.models.role import Role
from megarlhf.rehearsal.cost_model.decoding import EngineShape, RolloutWork
from megarlhf.rehearsal.cost_model.engine_time import shape_of
from megarlhf.rehearsal.fakes.deal import deal
from megarlhf.rehearsal.fakes.drawn_samples import ConversationLengths, SampleDraws, drawn_stretches
from megarlhf.rehearsal.fakes.lengths import Lengths
from megarlhf.rollout.engine import gather_indexed
from megarlhf.rollout.megatron_engine import MegatronEngine
from megarlhf.rollout.requests import RequestSource
from megarlhf.rollout.responses import FinishedResponses, Index, IndexEntry, Response, ResponsePart, Sampling, parts_of
from megarlhf.rollout.vllm.engine import VllmEngine
from megarlhf.rollouts import Rollouts
from megarlhf.runtime import Runtime

TOKEN = 5
"""The token of every response. It is none of those at the beginning of a tokenizer, which may end a response."""


@dataclass(frozen=True, kw_only=True)
class EngineBudget:
    """Bounds of the engine's memory on a device."""

    device_bytes: int
    """Memory of the device; 0 means unbounded, as on a CPU."""
    reserved_bytes: int
    """Memory that the process takes before torch allocates anything: context and communicators."""
    activation_bytes: int
    """Memory that vLLM measures for its own forward and keeps free of the cache."""
    held_bytes: Callable[[], int]
    """Current memory of the trainer's tensors."""


class _Model(nn.Module):
    """Parameters under vLLM's names, which contain dots."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.held = dict(parameters)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return iter(self.held.items())


class _LLM:
    """The part of `vllm.LLM` that the real engine uses, without generation."""

    def __init__(self, parameters: Mapping[str, Tensor], cache: Tensor) -> None:
        self._model, self.cache = _Model(parameters), cache

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self._model)]

    def reset_prefix_cache(self) -> bool:
        return True


class RehearsedEngine(VllmEngine):
    """vLLM's engine without vLLM."""

    def __init__(
        self,
        rollout: RolloutConfig,
        actor: Role,
        dtype: torch.dtype,
        max_prompt_tokens: int,
        *,
        lengths: Lengths,
        memory: EngineBudget,
        estimate: Callable[[RolloutWork, EngineShape, int], Sequence[int]],
        on_refusal: Callable[[str], None],
        conversations: ConversationLengths | None = None,
    ) -> None:
        """
        lengths:       sampled tokens of responses
        conversations: lengths of conversations, if there is an environment

        Callbacks:

        estimate:   gets the work of all engines, and the shape and cache bytes of this rank's; returns the engine that
                    takes each piece of the queue.
        on_refusal: gets the reason why vLLM would not start. The rehearsal goes on with a cache for one sequence.
        """
        self._draws, self._memory = SampleDraws(lengths, conversations), memory
        self._estimate, self._refuse = estimate, on_refusal
        self._cache_bytes = 0
        super().__init__(rollout, actor, dtype, max_prompt_tokens)

    def _start(self, model_path: Path, max_model_len: int) -> Any:
        """Allocate memory as vLLM does."""
        held = self._memory.held_bytes()
        parameters = self._weights()
        weights = sum(tensor.numel() * tensor.element_size() for tensor in parameters.values())
        self._shape = shape_of(self._arch, self._tp, self._runtime.rank // self._tp * self._tp, self._dtype, weights)
        self._cache_bytes = self._cache_size(held, weights, max_model_len)
        return _LLM(parameters, self._cache())

    def _weights(self) -> dict[str, Tensor]:
        rank, device = self._runtime.rank, self._runtime.device
        shapes = vllm_placements(self._arch, tp=self._tp, tp_rank=rank % self._tp, rank=rank).storages
        return {name: torch.empty(shape, dtype=self._dtype, device=device) for name, shape in shapes.items()}

    @property
    def cache_tokens(self) -> int | None:
        return self._cache_bytes // self._shape.cache_bytes_per_token

    def _cache_tensors(self) -> Sequence[Tensor]:
        return [self._llm.cache]

    def _require_room(self, nbytes: int, what: str) -> None:
        """Report a lack of memory as the real engine does. The rehearsal goes on."""
        memory = self._memory
        free = memory.device_bytes - memory.reserved_bytes - memory.held_bytes()
        if memory.device_bytes and free < nbytes:
            self._refuse(
                f"vLLM's {what} of {_gib(nbytes)} could not be loaded again: {_gib(free)} of the device are free"
            )

    def _free_bytes(self) -> int:
        """Without bound: all ranks have to use buckets of one size, and what a device lacks is shown by its need. The
        memory of the machine that rehearses says nothing."""
        return 1 << 60

    def _cache(self) -> Tensor:
        return torch.empty(self._cache_bytes, dtype=torch.uint8, device=self._runtime.device)

    def _cache_size(self, held: int, weights: int, max_model_len: int) -> int:
        """Bytes of the cache. vLLM takes its share of the whole device, and expects to find it free
        (`vllm/v1/worker/gpu_worker.py`, init_device and determine_available_memory)."""
        rollout, device = self._rollout, self._memory.device_bytes
        if not device:
            return rollout.vllm.cpu_cache_gib << 30
        share, taken = int(device * rollout.vllm.gpu_memory_utilization), held + self._memory.reserved_bytes
        named = f"rollout.vllm.gpu_memory_utilization = {rollout.vllm.gpu_memory_utilization}"
        least = max_model_len * self._shape.cache_bytes_per_token
        if device - taken < share:
            self._refuse(
                f"vLLM would not start: {named} of {_gib(device)} is {_gib(share)}, and {_gib(device - taken)} are "
                f"free after the roles ({_gib(held)}) and the process itself ({_gib(taken - held)}); lower "
                "rollout.vllm.gpu_memory_utilization, or split the roles further (tp, pp, more ranks)"
            )
        cache = share - weights - self._memory.activation_bytes
        if cache < least:
            self._refuse(
                f"vLLM would not start: {named} of {_gib(device)} is {_gib(share)}; its weights take {_gib(weights)} "
                f"and its own forward {_gib(self._memory.activation_bytes)}, which leaves {_gib(max(0, cache))} for "
                f"the cache, and one sequence of {max_model_len} tokens needs {_gib(least)}; raise the share or "
                "rollout.parallel.tp"
            )
        return max(cache, least)

    def _check_memory(self) -> None:
        """Checks nothing: only the live engine can tell whether vLLM's loader leaves weights in place."""

    def _check_table(self, actor: ModelShard) -> None:
        """Checks nothing: tests prove the table against vLLM's loader."""

    def generate(
        self,
        prompts: Sequence[Tensor],
        seeds: Sequence[int],
        sampling: Sampling,
        *,
        parts: Sequence[ResponsePart] | None = None,
        bank: FinishedResponses | None = None,
        should_stop: Callable[[], bool] | None = None,
        conversations: RequestSource | None = None,
    ) -> Rollouts:
        """Samples of drawn lengths, each on the engine that would generate it."""
        self._wake(to_generate=True)
        tp, world = self._tp, self._runtime.world_size
        given = parts_of(parts, len(prompts), sampling)
        talks = conversations is not None
        index = self._draws.index(seeds, given, sampling, self._version, with_environment=talks)
        drawn = [drawn_stretches(entry, part) for entry, part in zip(index, given, strict=True)]
        work, assignment = deal(prompts, given, drawn, self._rollout.balance, world // tp, self._seen)
        shares = [list(rows) for rows in assignment.first]
        for rows, engine in zip(assignment.queue, self._estimate(work, self._shape, self._cache_bytes), strict=True):
            shares[engine] += rows
        owned = {engine * tp + rank: share[rank::tp] for engine, share in enumerate(shares) for rank in range(tp)}
        rollouts = given_responses(owned, index, self._runtime)
        self._seen.record_drawn(prompts, given, rollouts, sampling.max_tokens)
        return rollouts

    def close(self) -> None:
        self._sleeper.forget()
        self._llm = None


class GivenResponses(MegatronEngine):
    """The engine `megatron` without its forwards: every rank answers for an equal share. It also replaces any engine
    where only the trainer is of interest."""

    def __init__(
        self,
        actor: Role,
        lengths: Lengths,
        conversations: ConversationLengths | None = None,
    ) -> None:
        super().__init__(actor.shard, 1, actor.parts)
        self._runtime = actor.mesh.runtime
        self._draws = SampleDraws(lengths, conversations)

    def generate(
        self,
        prompts: Sequence[Tensor],
        seeds: Sequence[int],
        sampling: Sampling,
        *,
        parts: Sequence[ResponsePart] | None = None,
        bank: FinishedResponses | None = None,
        should_stop: Callable[[], bool] | None = None,
        conversations: RequestSource | None = None,
    ) -> Rollouts:
        self._parts.to_compute()
        given = parts_of(parts, len(prompts), sampling)
        talks = conversations is not None
        index = self._draws.index(seeds, given, sampling, self.weight_version, with_environment=talks)
        shares = dict(enumerate(split_evenly(len(prompts), self._runtime.world_size)))
        return given_responses(shares, index, self._runtime)


def given_responses(shares: Mapping[int, Sequence[int]], entries: Sequence[IndexEntry], runtime: Runtime) -> Rollouts:
    """Rollouts of these lengths, made by the functions of a real engine.

    shares: rows by the rank that answers for them.
    """
    index: list[Index] = [{n: entries[n] for n in shares.get(rank, ())} for rank in range(runtime.world_size)]
    mine = {
        n: Response(
            [TOKEN] * entry.length,
            [-1.0] * entry.length,
            entry.finished,
            entry.versions,
            entry.stretches,
            [TOKEN] * sum(entry.stretches[1::2]),
            entry.dialogue,
        )
        for n, entry in index[runtime.rank].items()
    }
    status: list[Any] = [(part, False, 0.0) for part in index]
    dist.all_gather_object(status, status[runtime.rank])  # as the real engines do; here the content is known
    return gather_indexed(mine, index, len(entries), runtime.device)


def forward_bytes(arch: Architecture, tp: int) -> int:
    """Memory of vLLM's own forward on one rank, which it keeps free of the cache. Assumed to be residual stream, norm's
    output and MLP of the largest batch of tokens, and the logits of all sequences in fp32.

    Source: vllm/v1/worker/gpu_worker.py, determine_available_memory, which measures it by such a forward;
    vllm/engine/arg_utils.py for its sizes on a GPU of 70 GiB or more.
    """
    width = max(arch.ffn_size, arch.experts_per_token * arch.expert_ffn_size if arch.num_experts else 0)
    return 16384 * 2 * (4 * arch.hidden_size + 3 * width // tp) + 1024 * 4 * arch.vocab_size


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
