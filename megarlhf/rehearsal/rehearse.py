"""A whole rehearsal, from a request to its result."""

from __future__ import annotations

import resource
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import Head
from megarlhf.config import RLConfig
from megarlhf.planning.preflight import preflight
from megarlhf.planning.weight_traffic import plan_transfer, transfer_setup
from megarlhf.rehearsal.cost_model.margin import Facts, engine_items, facts_of, margin, total_bytes
from megarlhf.rehearsal.cost_model.pricing import Pricing
from megarlhf.rehearsal.fake_device import torch_patches
from megarlhf.rehearsal.fake_device.ledger import PhaseMemory
from megarlhf.rehearsal.fakes.drawn_samples import ASSUMED_OF_CONVERSATIONS, conversation_lengths, default_sampled
from megarlhf.rehearsal.fakes.inputs import StandIns, stand_in
from megarlhf.rehearsal.fakes.lengths import Lengths
from megarlhf.rehearsal.fakes.phases import BETWEEN
from megarlhf.rehearsal.job import Job, RankRecord, layouts_of, runtime_of
from megarlhf.rehearsal.kinds import Kind, choose_ranks, complete_pipelines, first_rank, named_ranks, stages_of
from megarlhf.rehearsal.processes import OnProgress, run_ranks
from megarlhf.rehearsal.request import Request
from megarlhf.rehearsal.result import (
    AssumptionRow,
    HostRow,
    MarginRow,
    MessageRow,
    PhaseRow,
    RankResult,
    Reshard,
    Result,
    ResumePointRow,
)
from megarlhf.rehearsal.timeline.messages import labels_of
from megarlhf.rehearsal.times import times_of
from megarlhf.rollout.engines import engine_of
from megarlhf.weights.checkpoint.dtype import resolve_dtype
from megarlhf.weights.plan.traffic import Links

MAIN_ROLES = ("actor", "reward_model")
"""Roles in the order in which one is chosen to have its pipelines rehearsed whole."""
PROCESS_GIB = 3.0
"""Host memory of a rank before it makes a tensor, with CUDA's libraries: assumed. Python, torch, Megatron-Core and vLLM
take 1.2 GiB on a machine without a GPU."""


def rehearse(request: Request, on_progress: OnProgress = lambda progress: None) -> Result:
    """Run the program for one rank of each kind and combine the records.

    Raises: ValueError for what the program refuses; RuntimeError where a rehearsed rank fails.
    """
    torch_patches.require_tested_torch()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="megarlhf-rehearsal-") as directory:
        stand_ins = stand_in(
            request.cfg,
            Path(directory),
            prompt_lengths=request.prompt_lengths,
            response_lengths=request.response_lengths,
            steps=request.steps,
            resume_point=request.resume_point,
        )
        device_type = torch_patches.device_of(request.hardware.kind).type
        with stand_ins.naming_users_directories():
            preflight(request.command, stand_ins.cfg, request.world_size, device_type=device_type, weights=False)
            rehearsal = _Rehearsal(request, stand_ins, on_progress)
            records = rehearsal.records()
        return rehearsal.result(records, time.perf_counter() - began)


class _Rehearsal:
    """State of one rehearsal."""

    def __init__(self, request: Request, stand_ins: StandIns, on_progress: OnProgress) -> None:
        self.request, self.stand_ins, self.on_progress = request, stand_ins, on_progress
        self.cfg: Any = stand_ins.cfg
        self.price = Pricing(request.hardware, request.ranks_per_node)
        device = torch_patches.device_of(request.hardware.kind)
        runtime = runtime_of(0, request.world_size, request.ranks_per_node, device)
        self.layouts = layouts_of(self.cfg, runtime)
        self.main = next(role for role in MAIN_ROLES if role in self.layouts)
        self.kinds: list[Kind] = []
        self.responses = request.response_lengths or default_responses(self.cfg)
        self.conversations = conversation_lengths(
            self.cfg, turns=request.turns, sampled=self.responses, observed=request.observed_lengths
        )

    def records(self) -> dict[int, RankRecord]:
        """Records of the chosen ranks."""
        request = self.request
        if request.ranks is not None:
            self.kinds = named_ranks(request.ranks, self.layouts)
            return self._run([kind.rank for kind in self.kinds])
        first = first_rank(self.layouts, self.main)
        records = self._run([first])
        busy = self.request.routing.skew > 1.0
        self.kinds = choose_ranks(self.layouts, self.main, records[first].loads, busy_expert=busy)
        records |= self._run([kind.rank for kind in self.kinds if kind.rank != first])
        if first not in {kind.rank for kind in self.kinds}:
            stages = stages_of(first, self.layouts)
            stands_for = next(kind.stands_for for kind in self.kinds if kind.stages == stages)
            self.kinds.append(Kind(first, stages, stands_for, "the first rank, which tells how much work each has"))
        return records

    def _run(self, ranks: Sequence[int]) -> dict[int, RankRecord]:
        jobs = [self._job(rank) for rank in ranks]
        num_ranks = len({*ranks, *(kind.rank for kind in self.kinds)})
        records = run_ranks(
            jobs, self.price, workers=self.request.workers, on_progress=self.on_progress, ranks=num_ranks
        )
        return dict(zip(ranks, records, strict=True))

    def _job(self, rank: int) -> Job:
        request = self.request
        on_gpu = request.hardware.kind == "gpu"
        return Job(
            command=request.command,
            cfg=self.cfg,
            rank=rank,
            world_size=request.world_size,
            ranks_per_node=request.ranks_per_node,
            kind=request.hardware.kind,
            layers=request.layers if on_gpu else "local",
            num_steps=request.steps,
            response_lengths=self.responses,
            conversations=self.conversations,
            device_bytes=request.device_bytes if on_gpu else 0,
            margin=request.margin,
            rollout_tokens_per_second=request.rollout_tokens_per_second,
            routing=request.routing,
        )

    def result(self, records: Mapping[int, RankRecord], seconds: float) -> Result:
        """Result of the rehearsal, from the records of its ranks."""
        request, sections = self.request, self.cfg.roles()
        ranks = [self._rank(kind, records[kind.rank]) for kind in self.kinds]
        tightest = max(ranks, key=lambda rank: rank.need)
        refusals = list(dict.fromkeys(problem for record in records.values() for problem in record.refusals))
        groups = labels_of(self.layouts).general
        whole = complete_pipelines((kind.rank for kind in self.kinds), self.layouts[self.main])
        tokens = _trained_tokens(records, self.main)
        times, faults = times_of(records, whole, self.price, groups, request.world_size, tokens, self._dtype())
        host = max((_host(rank) for rank in ranks), key=lambda rows: sum(row.nbytes for row in rows))
        first = next(iter(records.values()))
        assumptions: Counter[Any] = Counter()
        for record in records.values():
            assumptions.update(dict(record.assumptions))
        largest = sorted((record.tool_gib for record in records.values()), reverse=True)[: request.workers]
        return Result(
            command=request.command,
            world_size=request.world_size,
            ranks_per_node=request.ranks_per_node,
            steps=request.steps,
            layouts={role: sections[role].parallel.describe(layout) for role, layout in self.layouts.items()},
            capacity=request.device_bytes,
            fits=not refusals and tightest.need <= request.device_bytes,
            tightest=tightest.rank,
            refusals=refusals,
            ranks=ranks,
            host=host,
            host_per_node=sum(row.nbytes for row in host) * min(request.ranks_per_node, request.world_size),
            times=times,
            rollouts=first.rollouts,
            reshard=self._reshard(),
            faults=faults,
            assumptions=[
                AssumptionRow(**vars(assumption), count=count) for assumption, count in assumptions.most_common()
            ],
            notes=[*self.stand_ins.notes, *self._notes(), *self._notes_of_times(whole)],
            hardware=request.hardware.name,
            hardware_sources=request.hardware.sources,
            config=request.cfg.model_dump(mode="json"),
            tool_seconds=seconds,
            tool_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 + sum(largest),
        )

    def _rank(self, kind: Kind, record: RankRecord) -> RankResult:
        margins = [self._margin(record, phase) for phase in record.memory]
        needs = [
            phase.peak + sum(item.nbytes for item in items) for phase, items in zip(record.memory, margins, strict=True)
        ]
        # The time between phases begins with the memory that the phase before it has left.
        most = max(range(len(needs)), key=lambda n: (needs[n], record.memory[n].phase not in (BETWEEN, "offload")))
        peak, items = record.memory[most], margins[most]
        points = sorted((point for phase in record.memory for point in phase.curve), key=lambda point: point[0])
        begins = [(begin, phase.step, phase.phase) for phase in record.memory for begin in phase.begins]
        return RankResult(
            rank=kind.rank,
            stages=dict(kind.stages),
            stands_for=kind.stands_for,
            why=kind.why,
            memory=[_phase_row(phase) for phase in record.memory],
            peak=peak.peak,
            peak_at=(peak.step, peak.phase),
            margin=items,
            need=needs[most],
            curve=points,
            phases_at=sorted(begins, key=lambda begin: begin[0]),
            messages=[MessageRow(**line._asdict(), count=count, nbytes=n) for line, count, n in record.messages],
            groups_created=record.groups_created,
            memberships=record.memberships,
            host_peak=max(phase.host_peak for phase in record.memory),
            resume_point=_resume_point(record),
            offloaded=record.offloaded,
            cache_bytes=record.cache_bytes,
        )

    def _margin(self, record: RankRecord, phase: PhaseMemory) -> list[MarginRow]:
        """Margin of a rank in one phase. What a phase alone takes is given back before an engine wakes."""
        if self.request.hardware.kind != "gpu":
            return []
        # Only one role's kernels run at a time: those of the trained role that needs most count.
        facts = max(
            (self._facts(record, phase, role) for role in self._trained(record)),
            key=lambda facts: total_bytes(margin(self.request.margin, facts)),
        )
        # vLLM's memory beside weights and cache stays allocated while others work.
        items = [*margin(self.request.margin, facts), *engine_items(self.request.margin, self._engine_tp)]
        return [
            MarginRow(name=item.name, nbytes=item.nbytes, scaling=item.scaling, source=item.source) for item in items
        ]

    def _trained(self, record: RankRecord) -> list[str]:
        names = [name for name in self.layouts if f"train/{name}" in record.loads]
        return names or [self.main]

    def _facts(self, record: RankRecord, phase: PhaseMemory, role: str) -> Facts:
        section, trains = self.cfg.roles()[role], phase.phase == f"train/{role}"
        return facts_of(
            record.reached,
            record.memberships,
            phase,
            architecture_from_hf(section.model.hf_directory()),
            tp=self.layouts[role].tp,
            tokens=max((load.longest for load in record.loads.get(phase.phase, ())), default=0) if trains else 0,
            layers=self.request.layers,
        )

    @property
    def _engine_tp(self) -> int:
        """Tensor-parallel size of an engine; 0 where there is none."""
        has_engine = isinstance(self.cfg, RLConfig) and engine_of(self.cfg.rollout).has_own_weights
        return self.cfg.rollout.tp(self.cfg.actor) if has_engine else 0

    def _reshard(self) -> Reshard | None:
        request, cfg = self.request, self.cfg
        if not (isinstance(cfg, RLConfig) and engine_of(cfg.rollout).has_own_weights and request.reshard_plan):
            return None
        links = Links(rank_gbps=3600.0, node_gbps=3200.0)  # of times, which are not read here
        report = plan_transfer(
            transfer_setup(
                cfg,
                world_size=request.world_size,
                order="engine",
                ranks_per_node=request.ranks_per_node,
                links=links,
            )
        )
        return Reshard(
            received_min=min(report.received),
            received_mean=sum(report.received) / len(report.received),
            received_max=max(report.received),
            sent_max=max(report.sent),
            between_nodes=sum(report.tiers[0].entering),
        )

    def _notes(self) -> list[str]:
        request = self.request
        notes = ["Weights have no numbers: no checkpoint is read."]
        if isinstance(self.cfg, RLConfig):
            notes += self._notes_of_lengths(self.cfg.rollout.max_response_tokens)
            if self.cfg.rollout.is_stale:
                notes.append("The rollout of step 1 is longer: it also begins the samples of later steps.")
            if not engine_of(self.cfg.rollout).has_own_weights:
                notes.append("The engine megatron generates nothing: its time and memory are not included.")
        if request.hardware.kind == "gpu":
            notes.append(
                "Layers are those of TransformerEngine, by a table of what they keep (docs/rehearsal-gpu.md)."
                if request.layers == "te"
                else "Layers are the local ones, as on a machine without TransformerEngine."
            )
        else:
            notes.append("The hardware file describes a CPU: layers are the local ones, and there is no margin.")
        if any(architecture_from_hf(role.model.hf_directory()).num_experts for role in self.cfg.roles().values()):
            notes.append(f"Routing of experts is stated: {request.routing.description}.")
        return notes

    def _notes_of_lengths(self, longest: int) -> list[str]:
        """Notes about the lengths of samples."""
        request, talks = self.request, self.conversations
        if talks is None:
            how = "" if request.response_lengths else " (assumed: give --response-lengths)"
            return [f"Lengths of responses: {self.responses.describe()}, at most {longest}{how}."]
        given = {"--response-lengths": request.response_lengths}
        if talks.limits.max_turns > 1:
            given |= {"--turns": request.turns, "--observed-lengths": request.observed_lengths}
        assumed = ", ".join(option for option, lengths in given.items() if lengths is None)
        how = f" (assumed: give {assumed})" if assumed else ""
        return [f"Lengths of conversations: {talks.describe(longest)}{how}.", ASSUMED_OF_CONVERSATIONS]

    def _notes_of_times(self, whole: Sequence[int]) -> list[str]:
        """Notes about ranks that are not in the replay's times."""
        apart = len(self.kinds) - len(whole)
        if not whole:
            return [f"There are no times: no complete pipeline of {self.main} is among the rehearsed ranks."]
        if apart:
            notes = [
                f"Times are those of complete pipelines of {self.main}: {apart} of the rehearsed ranks are in none."
            ]
        else:
            notes = []
        cut = [role for role, layout in self.layouts.items() if complete_pipelines(whole, layout) != list(whole)]
        if cut:
            notes.append(
                f"Pipelines of {' and '.join(cut)} have another layout and are not rehearsed completely: waits "
                "between their stages are not in the times, and faults between them are not found (--ranks all has "
                "them)."
            )
        return notes

    def _dtype(self) -> str:
        return "bfloat16" if "bfloat16" in self.request.hardware.peaks and self._is_bf16() else "float32"

    def _is_bf16(self) -> bool:
        head: Head = "lm" if self.main == "actor" else "scalar"
        return resolve_dtype(self.main, self.cfg.roles()[self.main].model, head).name == "bf16"


def default_responses(cfg: Any) -> Lengths:
    """Default lengths of responses, or sampled tokens of conversations."""
    if isinstance(cfg, RLConfig):
        return default_sampled(cfg.rollout.max_response_tokens, cfg.environment)
    return default_sampled(cfg.data.max_response_tokens)


def _resume_point(record: RankRecord) -> ResumePointRow | None:
    written = record.resume_point
    if written is None:
        return None
    _, peak = max((phase.step, phase.peak) for phase in record.memory if phase.phase == "checkpoint")
    return ResumePointRow(
        nbytes=written.nbytes,
        files=len(written.bytes_by_role),
        tables=written.tables,
        peak=peak,
        host_bytes=written.host_bytes,
    )


def _host(rank: RankResult) -> list[HostRow]:
    process, written = int(PROCESS_GIB * 2**30), rank.resume_point
    under_way = min(0 if written is None else written.tables, rank.host_peak)
    return [
        HostRow(name="the process", nbytes=process, source="assumed: Python and libraries, including the device's"),
        HostRow(name="the program's tensors on the host", nbytes=rank.host_peak - under_way, source="counted"),
        HostRow(
            name="samples of later steps",
            nbytes=under_way,
            source="counted: responses that are being drawn in slices, as a resume point has them",
        ),
        HostRow(
            name="what is offloaded from the device",
            nbytes=rank.offloaded,
            source="counted: parts of roles and of the engine (ROLE.offload, rollout.vllm.sleep_level), pinned",
        ),
        HostRow(
            name="a resume point's copy of the state",
            nbytes=0 if written is None else written.host_bytes,
            source="counted: this rank's part, copied before it is written (resume/points/writer.py)",
        ),
    ]


def _phase_row(phase: PhaseMemory) -> PhaseRow:
    return PhaseRow(**{field.name: getattr(phase, field.name) for field in fields(PhaseRow)})


def _trained_tokens(records: Mapping[int, RankRecord], main: str) -> dict[int, int]:
    tokens = next(iter(records.values())).tokens
    return {step: count for (step, phase), count in tokens.items() if phase == f"train/{main}"}
