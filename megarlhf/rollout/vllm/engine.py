"""vLLM in the trainer's processes: engines of `tp` contiguous ranks, weights written in place by a copy plan.

Before the first write two things are proven on the engine itself: vLLM has not changed its parameters after loading,
and its loader fills them as the table says. Patches for the CPU are in `vllm/patches.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import vllm_placements
from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.config import RolloutConfig
from megarlhf.models.build import ModelShard, placements_on
from megarlhf.models.role import Role
from megarlhf.parallel.device_memory import Offloadable
from megarlhf.placement import RankPlacements
from megarlhf.rollout.balance import SeenLengths, assign, chunk_by_length
from megarlhf.rollout.engine import EngineFailure, gather_rollouts, missing_rows
from megarlhf.rollout.prompt_queue import PromptQueue, SharedCounter, agreed_key, rendezvous_store
from megarlhf.rollout.requests import RequestSource, WholeRows
from megarlhf.rollout.responses import FinishedResponses, ResponsePart, Sampling, parts_of
from megarlhf.rollout.vllm.build import build_llm, changed_in_memory, enqueue
from megarlhf.rollout.vllm.generate_loop import GenerateLoop
from megarlhf.rollout.vllm.patches import keep_default_group
from megarlhf.rollout.vllm.sleep import EngineMemory, cache_of_worker, make_sleeper, require_room
from megarlhf.rollouts import Rollouts
from megarlhf.runtime import free_bytes, without_torch_determinism
from megarlhf.weights.checks.certificate import Certificate, CertificateError, certify, nonzero_padding
from megarlhf.weights.checks.loader_check import check_loader, sample_tensors
from megarlhf.weights.checks.poison import poison, storages_with_nan
from megarlhf.weights.plan.copy_plan import CopyPlan, make_plan
from megarlhf.weights.transport.reshard import Resharder
from megarlhf.weights.transport.storages import check_storages, zero_padding

log = logging.getLogger(__name__)


class VllmEngine:
    """A vLLM `LLM` per `tp` contiguous ranks, all fed by one trainer."""

    rebuilds = 0
    """Always 0: `RestartingEngine` rebuilds engines."""
    _uses_adapter = False
    """Whether requests use vLLM's own adapter."""

    def __init__(self, rollout: RolloutConfig, actor: Role, dtype: torch.dtype, max_prompt_tokens: int) -> None:
        """actor: the role whose weights the engine will get"""
        model_path = actor.section.model.hf_directory()
        self._runtime = actor.mesh.runtime
        self._source, self._device_memory = actor.parts.parameters, actor.parts.device_memory
        self._tp = rollout.tp(actor.section)
        self._arch = architecture_from_hf(model_path)
        self._dtype, self._rollout = dtype, rollout
        self._max_model_len = max_prompt_tokens + rollout.max_response_tokens
        self._version = -1
        self.local_seconds = 0.0
        self._seen = SeenLengths()
        self._counter = SharedCounter(rendezvous_store, agreed_key())
        self._refusal = "it has not been given any"
        """Reason why the weights cannot be used; empty if they can."""
        self._sources: list[RankPlacements] = []
        self._plan: CopyPlan | None = None
        self._resharder: Resharder | None = None
        self._llm = self._start(model_path, self._max_model_len)
        self._parameters = self._live()
        self._places = self._addresses()
        memory = EngineMemory(self._llm, self._parameters, self._cache_tensors)
        self._sleeper = make_sleeper(memory, self._device_memory, self._sleep_level, self._require_room)
        self._actor: ModelShard | None = None
        """Actor whose weights the engine has, or had before it slept."""
        self._destinations = self._make_destinations()
        try:
            self._check_memory()
        except RuntimeError:
            self.close()
            raise

    def _start(self, model_path: Path, max_model_len: int) -> Any:
        """Build vLLM's `LLM`."""
        return build_llm(
            model_path,
            self._dtype,
            self._rollout,
            self._tp,
            max_model_len,
            self._runtime,
            bool(self._arch.num_experts),
            window=self._arch.sliding_window,
            sleeps=self._sleep_level > 0,
            further=self._arguments(),
        )

    def _arguments(self) -> dict[str, Any]:
        """Further arguments for vLLM."""
        return {}

    def _live(self, *, every_name: bool = False) -> dict[str, Tensor]:
        """Tensors of vLLM's model that updates write. every_name: list a tied head under its own name too"""
        return self._llm.apply_model(lambda model: dict(model.named_parameters(remove_duplicate=not every_name)))[0]

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def cache_tokens(self) -> int | None:
        return int((cache := self._llm.llm_engine.vllm_config.cache_config).num_gpu_blocks * cache.block_size)

    @property
    def _sleep_level(self) -> int:
        level = self._rollout.vllm.sleep_level
        return (2 if self._device_memory.auto else 0) if level == "auto" else level

    def _cache_tensors(self) -> Sequence[Tensor]:
        return cache_of_worker(self._llm)

    def _require_room(self, nbytes: int, what: str) -> None:
        require_room(nbytes, what, self._runtime)

    def _addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self._parameters.items()}

    def needs(self, *, to_generate: bool) -> Sequence[Offloadable]:
        """Parts that have to be on the device. Lost weights are copied from the actor first."""
        if to_generate and not self._sleeper.weights_lost:
            return self._sleeper.weights, self._sleeper.cache
        return self._source, self._sleeper.weights

    def _wake(self, *, to_generate: bool) -> None:
        """Load the weights, with the actor's weights for an update, or with valid values and the cache to generate.
        Collective."""
        if to_generate and self._sleeper.weights_lost and self._actor is not None and not self._refusal:
            self.update_weights(self._actor, self._version)
        self._device_memory.keep_only(*self.needs(to_generate=to_generate))
        if not self._sleeper.keeps_addresses:
            self._places = self._addresses()

    def _make_destinations(self) -> list[RankPlacements]:
        """Placements of the model in every rank's engine."""
        return [
            vllm_placements(self._arch, tp=self._tp, tp_rank=rank % self._tp, rank=rank)
            for rank in range(self._runtime.world_size)
        ]

    def _model_of(self, actor: ModelShard) -> ModelShard:
        """Model whose placements are sent: the base, into which an adapter is merged."""
        return actor.base

    def _values_of(self, actor: ModelShard) -> dict[str, Tensor]:
        """Values of the storages that are sent."""
        return actor.merged()

    def _plan_from(self, actor: ModelShard) -> CopyPlan:
        """Copy plan from every rank of the trainer to every rank of every engine. It is made once."""
        if self._plan is None:
            world = range(self._runtime.world_size)
            self._sources = [placements_on(self._model_of(actor), rank) for rank in world]
            check_storages(self._sources[self._runtime.rank], self._model_of(actor).parameters())
            self._plan = make_plan(self._sources, self._destinations, only_rank=self._runtime.rank)
        return self._plan

    def _check_memory(self) -> None:
        """Check that vLLM left its parameters in place after loading. Call it before anything is written."""
        with raise_on_all_ranks(
            _error(
                "vLLM's parameters cannot be filled by a copy plan",
                "Experts: vLLM leaves them as they are with moe_backend 'triton' on a GPU, and with this project's "
                "patches on a CPU; is another backend forced by the environment? rollout.engine=megatron samples "
                "without vLLM",
            )
        ) as problems:
            problems += changed_in_memory(self._loaded())

    def _loaded(self) -> Mapping[str, Tensor]:
        """Storages that vLLM filled with dummy values."""
        return self._parameters

    def _free_bytes(self) -> int:
        return free_bytes(self._runtime)

    def _resharder_from(self, actor: ModelShard) -> Resharder:
        """The resharder. It is made at the first update, after the proof that the table agrees with vLLM's own
        loader."""
        if self._resharder is None:
            self._check_table(actor)
            with raise_on_all_ranks(_error("the transfer cannot be planned", "Nothing has been sent")):
                resharder = Resharder(
                    self._plan_from(actor),
                    rank=self._runtime.rank,
                    dtype=self._dtype,
                    device=self._runtime.device,
                    bucket_bytes=self._rollout.reshard_bucket_mib << 20,
                    free_bytes=self._free_bytes,
                    keep_views=actor.arch.adapter is None,  # merged weights are new tensors each time
                )
            self._resharder = resharder  # on all ranks or on none
        return self._resharder

    def _check_table(self, actor: ModelShard) -> None:
        """Compare the table with vLLM's loader. This overwrites the parameters of a few layers: an update has to
        follow."""
        with raise_on_all_ranks(
            _error(
                f"megarlhf's table of {self._arch.model_type} cannot be trusted with this vLLM",
                "Weights copied by it could be wrong. If vLLM has changed, correct megarlhf/architectures/families/ or "
                "install the vLLM of requirements/; rollout.engine=megatron samples without vLLM",
            )
        ) as problems:
            placements = self._destinations[self._runtime.rank]
            problems += self._table_problems(actor)
            if not problems:
                zero_padding(placements, self._parameters)

    def _table_problems(self, actor: ModelShard) -> list[str]:
        placements = self._destinations[self._runtime.rank]
        return check_loader(placements, self._parameters, self._load, sample_tensors(self._arch), self._dtype)

    def _load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._llm.apply_model(lambda model: model.load_weights(tensors))

    def update_weights(self, actor: ModelShard, version: int) -> None:
        """Write the actor's weights into vLLM's parameters, and drop the cache of the old ones.

        Raises: on every rank, when anything failed on any: TransferError from the transfer, RuntimeError before and
        EngineFailure after it. The version then stays, and nothing is generated until an update succeeds.
        """
        self._wake(to_generate=False)
        self._refusal = f"the update to version {version} failed half way, and its weights are a mixture"
        resharder = self._resharder_from(actor)
        if self._sleeper.weights_lost:  # no copy writes there
            zero_padding(self._destinations[self._runtime.rank], self._parameters)
        if self._rollout.poison_weights:
            with raise_on_all_ranks(_error(f"the update to version {version} failed", "Nothing has been sent")):
                poison(self._parameters)
        self._transfer(resharder, actor)
        if self._rollout.poison_weights:
            with raise_on_all_ranks(
                _error(
                    f"the update to version {version} failed",
                    "NaN is poison: no copy of the plan wrote there, or the actor's own weights are NaN",
                )
            ) as problems:
                problems += storages_with_nan(self._destinations[self._runtime.rank], self._parameters)
        self._refusal = f"the cache of the weights before version {version} could not be forgotten"
        with raise_on_all_ranks(
            _error(
                f"the update to version {version} is not complete",
                "Responses would mix old and new weights; are requests still running?",
                EngineFailure,
            )
        ) as problems:
            if not self._llm.reset_prefix_cache():
                problems.append("vLLM did not reset its prefix cache")
        self._version, self._refusal, self._actor = version, "", actor
        self._sleeper.weights_lost = False

    def _transfer(self, resharder: Resharder, actor: ModelShard) -> None:
        resharder.run(self._values_of(actor), self._parameters)

    def verify_weights(self, actor: ModelShard) -> Certificate:
        """Compare vLLM's live parameters, every replica and all padding included, with the actor's."""
        if self._sleeper.weights_lost and self._actor is not None:
            self.update_weights(actor, self._version)
        self._wake(to_generate=False)
        kept, self._refusal = self._refusal, f"they were not found to be those of version {self._version}"
        try:
            with raise_on_all_ranks(lambda reasons: CertificateError("; ".join(reasons))) as problems:
                plan = self._plan_from(actor)
                problems += self._replaced()
                problems += nonzero_padding(self._destinations[self._runtime.rank], self._parameters)
            proof = certify(
                plan,
                self._sources,
                self._destinations,
                self._values_of(actor),
                self._parameters,
                rank=self._runtime.rank,
                dtype=self._dtype,
                version=self._version,
            )
        except CertificateError as error:
            raise CertificateError(
                f"vLLM's weights are not certified: {error}. Samples drawn now might not be the actor's; was a "
                "parameter written or replaced outside update_weights?"
            ) from error
        self._refusal = kept
        log.info("weights of version %d certified: digest %s, %.3f s", proof.version, proof.digest, proof.seconds)
        return proof

    def _replaced(self) -> list[str]:
        """Problems of parameters whose memory is no longer the memory that updates write; tied heads under their own
        name too."""
        live = self._live(every_name=True)
        known_addresses, shapes = set(self._places.values()), self._destinations[self._runtime.rank].storages
        problems = [f"{name} is no longer in the model" for name in sorted(self._places.keys() - live.keys())]
        for name, tensor in live.items():
            mine = self._parameters.get(name, tensor)
            differs = (tensor.stride(), tensor.dtype) != (mine.stride(), mine.dtype)
            if (
                differs
                or tensor.data_ptr() not in known_addresses
                or (name in shapes and tuple(tensor.shape) != shapes[name])
            ):
                problems.append(f"{name} has memory of its own, which no update writes")
            elif tensor.data_ptr() != self._places.get(name, tensor.data_ptr()):
                problems.append(f"{name} has the memory of another parameter")
        return problems

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
        """Generate responses. `rollout.balance` assigns rows to engines. Within an engine every rank draws the same and
        keeps its share.

        Raises: RuntimeError unless the last update succeeded; ValueError for prompts that are too long.
        """
        if self._refusal:
            raise RuntimeError(
                f"vLLM has no weights to generate with: {self._refusal}; call update_weights until it succeeds"
            )
        given = parts_of(parts, len(prompts), sampling)
        longest = max((len(prompt) - len(part.so_far) for prompt, part in zip(prompts, given, strict=True)), default=0)
        if longest + sampling.max_tokens > self._max_model_len:
            raise ValueError(
                f"a prompt of {longest} tokens and a response of up to {sampling.max_tokens} do not fit into the "
                f"{self._max_model_len} tokens that the engine was built for; raise data.max_prompt_tokens or lower "
                "rollout.max_response_tokens"
            )
        bank = FinishedResponses() if bank is None else bank
        source = WholeRows(prompts, seeds, given) if conversations is None else conversations
        source.restart(bank, self._version)
        self._counter.restart()
        feed = self._feed(prompts, given, missing_rows(bank, len(prompts)))
        self._wake(to_generate=True)
        self._refusal = "it failed while it drew responses, and may be in any state"
        began = time.monotonic()
        failed = _error("vLLM failed while it drew responses", "", EngineFailure)
        with raise_on_all_ranks(failed), without_torch_determinism():
            loop = GenerateLoop(
                self._llm.llm_engine,
                partial(enqueue, self._llm, sampling, adapter=self._uses_adapter),
                feed,
                source,
                sampling,
                self._version,
                bank,
                self._runtime.rank % self._tp,
                self._tp,
            )
            stopped = loop.run(should_stop, self._lockstep_group())
            self.local_seconds = time.monotonic() - began
        self._refusal = ""
        seconds = self.local_seconds if self._tp < self._runtime.world_size else None
        rollouts = gather_rollouts(bank.held, len(prompts), self._runtime.device, stopped=stopped, seconds=seconds)
        self._seen.record_drawn(prompts, given, rollouts, sampling.max_tokens)
        return rollouts

    def _lockstep_group(self) -> Any:
        """Group of the ranks of this engine on the CPU; None for an engine of one rank."""
        if self._tp == 1:
            return None
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().cpu_group

    def _feed(self, prompts: Sequence[Tensor], parts: Sequence[ResponsePart], missing: Sequence[int]) -> PromptQueue:
        """Queue of the missing rows that this rank's engine draws."""
        engines, rank = self._runtime.world_size // self._tp, self._runtime.rank
        pieces = chunk_by_length(prompts, parts, missing, engines, self._seen)
        counter = self._counter if rank % self._tp == 0 else None
        return PromptQueue(assign(self._rollout.balance, pieces, engines), rank // self._tp, counter)

    def close(self) -> None:
        """Shut the engine down. The run's own process groups stay."""
        self._sleeper.forget()
        with keep_default_group():
            self._llm.llm_engine.engine_core.shutdown()


def _error(what: str, advice: str, kind: type[RuntimeError] = RuntimeError) -> Callable[[Sequence[str]], RuntimeError]:
    """Make the error for `raise_on_all_ranks`, with a line for each reason."""
    return lambda reasons: kind("\n".join(["\n  ".join([f"{what}:", *reasons]), *filter(None, [advice])]))
