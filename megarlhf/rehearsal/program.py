"""One rank of a rehearsal: the command's own `run`, on a device without numbers, in a world of its own."""

from __future__ import annotations

import contextlib
import importlib
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megarlhf.config import FrozenModel, RLConfig, RoleConfig, RolloutConfig
from megarlhf.layout import MeshLayout
from megarlhf.models.build import ModelShard
from megarlhf.models.role import Role
from megarlhf.parallel.mesh import GROUPS_AXES
from megarlhf.rehearsal import interfaces
from megarlhf.rehearsal.device import Device
from megarlhf.rehearsal.engine import EngineMemory, GivenResponses, RehearsedEngine
from megarlhf.rehearsal.interfaces import FakeTensor, Hooks, Kind
from megarlhf.rehearsal.lengths import Lengths
from megarlhf.rehearsal.memory import GPU_BLOCK, Ledger, PhaseMemory
from megarlhf.rehearsal.optimizer import KERNELS
from megarlhf.rehearsal.others import EMPTY_BANK, gathered
from megarlhf.rehearsal.routing import Routing
from megarlhf.rehearsal.sites import Assumption, Assumptions
from megarlhf.rehearsal.steps import Enough, Steps
from megarlhf.rehearsal.trace import Event, Mark, Work
from megarlhf.rehearsal.transformer_engine import Layers, Shared, replace_layers
from megarlhf.rehearsal.weights import NoNumbers
from megarlhf.rehearsal.wire import Line, Wire, labels_of
from megarlhf.rehearsal.work import Meter, Price
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.runtime import Runtime
from megarlhf.trainers.parts import Parts
from megarlhf.trainers.prompts import engine_dtype

ENTRIES = {name: f"megarlhf.trainers.{name}" for name in ("sft", "rm", "dpo", "rl")}
"""Module of each command that can be rehearsed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank is to rehearse."""

    command: str
    cfg: FrozenModel
    """With whatever stands in for what is missing: `stand_ins.py`."""
    rank: int
    world_size: int
    ranks_per_node: int
    kind: Kind
    layers: Layers = "te"
    """Of a GPU; on a CPU they are local ones."""
    num_steps: int
    response_lengths: Lengths
    device_bytes: int = 0
    """Of a device's memory; 0: not bounded."""
    reserved_bytes: int = 0
    """Of it, what is taken before and beside torch."""
    engine_activation_bytes: int = 0
    bare_engine: bool = False
    """Responses come from nowhere: no engine's weights, cache and updates."""
    routing: Routing = field(default_factory=Routing)
    """Of models with experts."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What a rehearsed rank has seen."""

    rank: int
    memory: list[PhaseMemory]
    messages: list[tuple[Line, int, int]]
    """(row, count, bytes)."""
    events: list[Event]
    flops: dict[tuple[int, str, Work], int]
    """By step, phase and work."""
    operations: dict[tuple[int, str], int]
    assumptions: list[tuple[Assumption, int]]
    groups_created: int
    memberships: int
    tool_seconds: float
    tool_gib: float


def roles_of(cfg: Any) -> dict[str, RoleConfig]:
    """The roles that a command builds."""
    if isinstance(cfg, RLConfig):
        return cfg.roles()
    names = ("actor", "reward_model", "reference")
    return {name: section for name in names if (section := getattr(cfg, name, None)) is not None}


def layouts_of(cfg: Any, world_size: int) -> dict[str, MeshLayout]:
    """Of each role, in the order of ranks."""
    return {name: section.parallel.layout(world_size, name) for name, section in roles_of(cfg).items()}


class Rank:
    """Rehearses one rank in this process, which it takes over: process group, device and patches are the process's."""

    def __init__(self, job: Job, price: Price) -> None:
        self.job = job
        self.device = interfaces.device_of(job.kind)
        self.ledger = Ledger(GPU_BLOCK if job.kind == "gpu" else 1)
        self.meter = Meter(price, ticked=self._ticked)
        labels = labels_of(list(layouts_of(job.cfg, job.world_size).values()), GROUPS_AXES)
        self.wire = Wire(job.rank, job.ranks_per_node, labels, self.meter.message)
        self.assumptions = Assumptions()
        self.mode = Device(self.device, self.ledger, self.wire, self.assumptions, self.meter)
        self._num_samples = 0
        """Of the last rollout."""
        self.mode.routing = job.routing
        self.steps = Steps(job.num_steps, self._moved, self._ended)
        self._shared = Shared(self.device, self.ledger.name)

    def run(self) -> RankRecord:
        """The whole rehearsal of this rank."""
        job, began = self.job, time.perf_counter()
        interfaces.join(job.rank, job.world_size, job.kind)
        created = interfaces.count_groups()
        runtime = Runtime(
            rank=job.rank,
            local_rank=job.rank % job.ranks_per_node,
            world_size=job.world_size,
            local_world_size=min(job.ranks_per_node, job.world_size),
            ranks_per_block=min(job.ranks_per_node, job.world_size),
            device=self.device,
            backend=interfaces.BACKEND,
        )
        run = importlib.import_module(ENTRIES[job.command]).run
        with created, interfaces.patched(self._hooks()), self.mode:
            with contextlib.suppress(Enough):
                run(job.cfg, runtime, self._parts())
            self.ledger.leave()
        return RankRecord(
            rank=job.rank,
            memory=self.ledger.phases,
            messages=[(line, count, self.wire.nbytes[line]) for line, count in self.wire.counts.items()],
            events=self.meter.events,
            flops=dict(self.meter.flops),
            operations=dict(self.meter.operations),
            assumptions=list(self.assumptions.counts.items()),
            groups_created=created.calls,
            memberships=created.memberships,
            tool_seconds=time.perf_counter() - began,
            tool_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        )

    def _parts(self) -> Parts:
        return Parts(phases=self.steps.phases, weights=NoNumbers(self._built), engine=self._engine)

    def _engine(
        self, rollout: RolloutConfig, actor: Role, max_prompt_tokens: int, micro_batch_samples: int
    ) -> RolloutEngine:
        job, runtime = self.job, actor.mesh.runtime
        if job.bare_engine or rollout.engine == "megatron":
            return GivenResponses(runtime, job.response_lengths, self._drew)
        return RehearsedEngine(
            actor.section.model.hf_directory(),
            engine_dtype(rollout, actor),
            rollout,
            rollout.tp(actor.section),
            max_prompt_tokens + rollout.max_response_tokens,
            runtime,
            lengths=job.response_lengths,
            memory=EngineMemory(
                device_bytes=job.device_bytes,
                reserved_bytes=job.reserved_bytes,
                activation_bytes=job.engine_activation_bytes,
                held_bytes=lambda: self.ledger.total,
            ),
            drew=self._drew,
            generated=self._generated,
        )

    def _drew(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def _generated(self, prompts: Sequence[int], responses: Sequence[int], cache_bytes: int) -> None:
        """The engine's time."""

    def _hooks(self) -> Hooks:
        return Hooks(
            device=self.device,
            scalar=self.mode.scalar,
            address=self.mode.address,
            reducing=lambda operation: setattr(self.mode, "reducing", operation),
            gathered=lambda mine: gathered(mine, self._num_samples, self.job.world_size),
            scattered=lambda: EMPTY_BANK,
            launched=self._launched,
            attention=None,
            optimizer=KERNELS[self.job.layers] if self.job.kind == "gpu" else None,
        )

    def _built(self, shard: ModelShard) -> None:
        if self.job.kind == "gpu" and self.job.layers == "te":
            replace_layers(shard, self._shared)
        self.ledger.name(shard.parameters().values(), "parameters")

    def _ticked(self, seconds: float) -> None:
        self.ledger.seconds = seconds

    def _moved(self, step: int, phase: str) -> None:
        self.meter.flush()
        self.ledger.enter(step, phase)
        self.wire.step = self.meter.step = step
        self.wire.phase = self.meter.phase = phase

    def _ended(self, step: int) -> None:
        self.meter.message(Mark(self.meter.phase, step))

    def _launched(self, name: str, arguments: Sequence[Any]) -> None:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        for tensor in tensors:
            self.mode.known.forget(tensor)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, FakeTensor))
        self.meter.kernel(nbytes, "float32")
