"""One rank of a rehearsal: the command's own `run`, on a device without numbers, in a world without other members."""

from __future__ import annotations

import contextlib
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megarlhf.config import RolloutConfig
from megarlhf.models.build import ModelShard
from megarlhf.models.role import Role
from megarlhf.parallel.mesh import forget_scratch_buffer
from megarlhf.rehearsal.cost_model.decoding import EngineShape, RolloutWork
from megarlhf.rehearsal.cost_model.engine_time import DecodePrice, estimate, max_sequences
from megarlhf.rehearsal.cost_model.margin import engine_items, facts_of, margin, total_bytes
from megarlhf.rehearsal.cost_model.meter import Meter, OperationPricing
from megarlhf.rehearsal.fake_device import torch_patches
from megarlhf.rehearsal.fake_device.assumptions import Assumptions
from megarlhf.rehearsal.fake_device.device import FakeDevice
from megarlhf.rehearsal.fake_device.fake_collectives import EMPTY_BANK, gathered
from megarlhf.rehearsal.fake_device.ledger import GPU_BLOCK, Ledger, PhaseMemory, merged
from megarlhf.rehearsal.fake_device.torch_patches import FakeTensor, Hooks
from megarlhf.rehearsal.fakes.batches import RankLoad, recorded_batches
from megarlhf.rehearsal.fakes.engine import EngineBudget, GivenResponses, RehearsedEngine, forward_bytes
from megarlhf.rehearsal.fakes.host_memory import RehearsedHost
from megarlhf.rehearsal.fakes.inputs import every_group
from megarlhf.rehearsal.fakes.phases import BETWEEN, Steps, StopRehearsal
from megarlhf.rehearsal.fakes.resume_point import PointSizes, RehearsedWriter
from megarlhf.rehearsal.fakes.weights import UninitializedWeights
from megarlhf.rehearsal.job import Job, RankRecord, layouts_of, runtime_of
from megarlhf.rehearsal.result import RolloutRow
from megarlhf.rehearsal.reuse.buckets import Buckets
from megarlhf.rehearsal.reuse.digests import equal_digests
from megarlhf.rehearsal.reuse.experts import EqualExperts
from megarlhf.rehearsal.reuse.layers import EqualLayers
from megarlhf.rehearsal.reuse.tape import Player, TapeRecorder
from megarlhf.rehearsal.timeline.messages import Wire, labels_of
from megarlhf.rehearsal.timeline.trace import StepMark
from megarlhf.rehearsal.transformer_engine.optimizer import KERNELS
from megarlhf.rehearsal.transformer_engine.replace import Shared, replace_layers
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.rollout.engines import engine_of
from megarlhf.rollout.factory import engine_dtype
from megarlhf.runtime import Runtime
from megarlhf.trainers.entries import import_entry
from megarlhf.trainers.run.factories import RunFactories


class RankPrice(OperationPricing, DecodePrice, Protocol):
    """Prices of everything that a rank does: `pricing.Pricing`."""

    def offload_seconds(self, nbytes: int) -> float: ...


class Rank:
    """Rehearsal of one rank in this process. It takes over process group, device and patches of the process."""

    def __init__(
        self,
        job: Job,
        price: RankPrice,
        on_phase: Callable[[int, str, int], None] = lambda step, phase, operations: None,
    ) -> None:
        """`on_phase` is called with step, phase and the number of operations so far whenever a phase begins."""
        self.job, self._price, self._on_phase = job, price, on_phase
        self.device = torch_patches.device_of(job.kind)
        self.ledger = Ledger(GPU_BLOCK if job.kind == "gpu" else 1)
        self.meter = Meter(price, ticked=lambda seconds: setattr(self.ledger, "seconds", seconds))
        self.runtime = runtime_of(job.rank, job.world_size, job.ranks_per_node, self.device)
        self.layouts = layouts_of(job.cfg, self.runtime)
        labels = labels_of(self.layouts)
        self.wire = Wire(job.rank, job.ranks_per_node, labels, self.meter.message)
        self.assumptions = Assumptions()
        self.mode = FakeDevice(self.device, self.ledger, self.wire, self.assumptions, self.meter)
        self.meter.values = self.mode.known.twin
        self._created = torch_patches.count_groups()
        self._loads: dict[str, list[RankLoad]] = {}
        self._tokens: Counter[tuple[int, str]] = Counter()
        self._rollouts: dict[int, RolloutRow] = {}
        self._refusals: list[str] = []
        self._parameters: list[Tensor] = []
        self._cache_bytes = 0
        self._hosts: list[RehearsedHost] = []
        self._held: dict[str, int] = {}
        self._written: list[PointSizes] = []
        self.mode.routing = job.routing
        self.steps = Steps(job.num_steps, self._enter_phase, self._end_step)
        player = Player(self.ledger, self.meter, self.wire, self.mode.fake, self.device)
        counters = self.ledger, self.meter, self.wire
        self._buckets = Buckets(*counters)
        self._equal_layers = EqualLayers(TapeRecorder(*counters), player, self.mode.known, self._buckets)
        self._equal_experts = EqualExperts(TapeRecorder(*counters), player, self.mode.known, self._buckets)
        self._equal_digests = equal_digests(TapeRecorder(*counters), player)
        self._shared = Shared(self.device, self.ledger.set_kind)

    def run(self) -> RankRecord:
        """Rehearse this rank."""
        job, began = self.job, time.perf_counter()
        torch_patches.join(job.rank, job.world_size, job.kind)
        forget_scratch_buffer()
        run = import_entry(job.command)
        created = self._created
        batches = recorded_batches(lambda: (self.wire.step, self.wire.phase), self._loads, self._tokens)
        # Backwards in this thread: autograd counts devices at a process's first backward, which may be long ago.
        in_one_thread = torch.autograd.set_multithreading_enabled(False)
        with contextlib.ExitStack() as stack:
            for scope in (created, torch_patches.patched(self._hooks()), batches, in_one_thread):
                stack.enter_context(scope)
            if job.reuse:
                stack.enter_context(self._equal_digests)
            stack.enter_context(self.mode)
            with contextlib.suppress(StopRehearsal):
                run(job.cfg, self.runtime, self._factories())
            self.ledger.leave()
        return RankRecord(
            rank=job.rank,
            memory=merged(self.ledger.phases),
            messages=[(line, count, self.wire.nbytes[line]) for line, count in self.wire.counts.items()],
            events=self.meter.events,
            flops=dict(self.meter.flops),
            work_seconds=dict(self.meter.work_seconds),
            recomputed_seconds=dict(self.meter.recomputed_seconds),
            operations=dict(self.meter.operations),
            assumptions=list(self.assumptions.counts.items()),
            reached=self.wire.reached(),
            groups_created=created.calls,
            memberships=created.memberships,
            loads=self._loads,
            tokens=dict(self._tokens),
            rollouts=list(self._rollouts.values()),
            refusals=self._refusals,
            cache_bytes=self._cache_bytes,
            held=self._held,
            offloaded=sum(host.nbytes for host in self._hosts),
            resume_point=self._written[-1] if self._written else None,
            tool_seconds=time.perf_counter() - began,
            tool_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        )

    def _factories(self) -> RunFactories:
        def host(device: torch.device) -> RehearsedHost:
            self._hosts.append(RehearsedHost(device, self.meter, self._price.offload_seconds))
            return self._hosts[-1]

        def writer(runtime: Runtime) -> RehearsedWriter:
            return RehearsedWriter(runtime, copied, self._written.append)

        def copied(nbytes: int) -> None:
            self.meter.spend("offload", self._price.offload_seconds(nbytes), 0.0)

        weights = UninitializedWeights(self._prepare)
        return RunFactories(
            phases=self.steps.phases,
            weights=weights,
            engine=self._engine,
            host=host,
            writer=writer,
            groups_with_signal=every_group,
        )

    def _engine(
        self, rollout: RolloutConfig, actor: Role, max_prompt_tokens: int, micro_batch_samples: int
    ) -> RolloutEngine:
        job = self.job
        if job.bare_engine or not engine_of(rollout).has_own_weights:
            return GivenResponses(actor, job.response_lengths, job.conversations)
        return RehearsedEngine(
            rollout,
            actor,
            engine_dtype(rollout, actor),
            max_prompt_tokens,
            lengths=job.response_lengths,
            memory=self._engine_memory(actor, rollout.tp(actor.section)),
            estimate=self._estimate,
            on_refusal=self._refusals.append,
            conversations=job.conversations,
        )

    def _engine_memory(self, actor: Role, tp: int) -> EngineBudget:
        job, arch = self.job, actor.shard.arch
        at_start = PhaseMemory(0, "build", 0, 0, 0, 0, {}, [], [])
        facts = facts_of(
            self.wire.reached(),
            self._created.memberships,
            at_start,
            arch,
            tp=actor.mesh.layout.tp,
            tokens=0,
            layers=job.layers,
        )
        engine_bytes = total_bytes(engine_items(job.margin, tp)) + forward_bytes(arch, tp)
        return EngineBudget(
            device_bytes=job.device_bytes,
            reserved_bytes=total_bytes(margin(job.margin, facts), before_tensors=True) if job.kind == "gpu" else 0,
            activation_bytes=engine_bytes if job.kind == "gpu" else 0,
            held_bytes=lambda: self.ledger.total,
        )

    def _estimate(self, work: RolloutWork, shape: EngineShape, cache_bytes: int) -> Sequence[int]:
        """Let every rank wait for the slowest engine. Returns the engine that takes each piece of the queue."""
        job, rollout = self.job, self.job.cfg.rollout  # type: ignore[attr-defined]
        self._cache_bytes = cache_bytes
        rollout_row, owners = estimate(
            work,
            shape,
            cache_bytes,
            self._price,
            tokens_per_second=job.rollout_tokens_per_second,
            max_running=max_sequences(rollout),
        )
        step = self.meter.step
        self._rollouts[step] = rollout_row.after(self._rollouts[step]) if step in self._rollouts else rollout_row
        self.meter.spend("rollout", rollout_row.slowest, 0.0)
        return owners

    def _hooks(self) -> Hooks:
        return Hooks(
            device=self.device,
            scalar=self.mode.scalar,
            address=self.mode.address,
            reducing=lambda operation: setattr(self.mode, "reducing", operation),
            gathered=lambda mine: gathered(mine, self.job.world_size),
            scattered=lambda: EMPTY_BANK,
            launched=self._count_kernel,
            attention=None,
            buckets=self._buckets,
            recomputing=lambda now: setattr(self.meter, "recomputing", now),
            optimizer=KERNELS[self.job.layers] if self.job.kind == "gpu" else None,
        )

    def _prepare(self, shard: ModelShard) -> None:
        if self.job.kind == "gpu" and self.job.layers == "te":
            replace_layers(shard, self._shared)
        self._parameters += shard.parameters().values()
        for parameter in shard.parameters().values():
            self.mode.known.forget(parameter)  # a checkpoint's values replace those it was made with
        if self.job.reuse:
            self._equal_experts.install(shard)
            self._equal_layers.install(shard)

    def _enter_phase(self, step: int, phase: str) -> None:
        self.meter.flush()
        if self.ledger.step == 0:
            # Megatron-Core moves them into buffers of its own, made together with those of gradients.
            self.ledger.set_kind(self._parameters, "parameters")
        self.ledger.enter(step, phase)
        self.wire.step = self.meter.step = step
        self.wire.phase = self.meter.phase = phase
        if phase != BETWEEN:
            self._on_phase(step, phase, sum(self.meter.operations.values()))

    def _end_step(self, step: int) -> None:
        self.meter.message(StepMark(self.meter.phase, step))
        self._held = self.ledger.bytes_by_kind()
        if step >= self.job.num_steps:
            self.ledger.leave()  # what is freed on the way out is no part of the run

    def _count_kernel(self, name: str, arguments: Sequence[Any]) -> None:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        for tensor in tensors:
            self.mode.known.forget(tensor)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, FakeTensor))
        self.meter.kernel(nbytes, "float32")
