"""Which launches a machine allows, and which not, with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.gpu_check.cases import (
    DTYPES,
    ENGINES,
    LAYOUTS,
    MEMORY_LAYOUTS,
    PACKED,
    PROMPT_LAYOUTS,
    PROMPT_MODELS,
    RESUME_LAYOUTS,
    Job,
    Launch,
    engine_job,
    grpo_job,
    memory_jobs,
    ppo_job,
    resume_jobs,
    sft_job,
)
from tools.gpu_check.rows import Row

CHECKS = ("kernels", "sft", "ppo", "prompts", "resume", "engine", "memory")
"""In the order in which they run."""

UNCOUNTED = "a CPU's allocator does not count what it hands out"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where ranks can be started."""

    gpus_per_node: int
    nodes: int = 1
    on_gpus: bool = True
    """False: the same checks on a CPU over gloo, with as many ranks as are said."""
    transformer_engine: bool = False

    @property
    def device(self) -> str:
        return "GPU" if self.on_gpus else "rank"

    def lacks(self, ranks: int) -> str | None:
        """Why so many ranks cannot be started, the same number on each node."""
        there = self.gpus_per_node * self.nodes
        if ranks > there:
            return f"needs {ranks} {self.device}s, there {'is' if there == 1 else 'are'} {there}"
        if not self.places(ranks):
            return f"{ranks} ranks do not divide over {self.nodes} nodes of {self.gpus_per_node} {self.device}s"
        return None

    def places(self, ranks: int) -> list[int]:
        """Numbers of nodes over which so many ranks are spread: as few as hold them, and two where one holds them."""
        fits = [n for n in range(1, self.nodes + 1) if ranks % n == 0 and ranks <= n * self.gpus_per_node]
        return fits[:2] if fits[:2] == [1, 2] else fits[:1]


def launches(machine: Machine, only: Sequence[str], inputs: Path, out: Path) -> tuple[list[Launch], list[Row]]:
    """What is to be started, in order, and a row for each case that this machine is too small for."""
    planned: list[Launch] = []
    skipped: list[Row] = []
    for launch in _all(machine, inputs, out):
        if launch.check not in only:
            continue
        why = machine.lacks(launch.ranks)
        if launch.check == "memory" and not machine.on_gpus:
            why = UNCOUNTED
        if why is not None:
            skipped.append(Row(check=launch.check, case=launch.case, status="skipped", note=why))
            continue
        for nodes in machine.places(launch.ranks):
            case = launch.case + (f" over {nodes} nodes" if nodes > 1 else "")
            planned.append(replace(launch, case=case, nodes=nodes))
    return planned, skipped


def _all(machine: Machine, inputs: Path, out: Path) -> Iterator[Launch]:
    """Whatever the machine's size."""
    makers = {"sft": sft_job, "ppo": ppo_job}
    for check, make in makers.items():
        for layout, (ranks, parallel) in LAYOUTS.items():
            run = out / check / layout
            jobs = [make(inputs, run, model, dtype, parallel) for model in PACKED for dtype in DTYPES]
            yield Launch(check=check, case=layout, ranks=ranks, jobs=[*_with_local_layers(jobs, machine)])
    for layout in PROMPT_LAYOUTS:
        ranks, parallel = LAYOUTS[layout]
        run = out / "prompts" / layout
        jobs = [
            grpo_job(inputs, run, model, dtype, parallel, shared=shared)
            for model in PROMPT_MODELS
            for dtype in DTYPES
            for shared in (True, False)
        ]
        yield Launch(check="prompts", case=layout, ranks=ranks, jobs=[*_with_local_layers(jobs, machine)])
    for layout in RESUME_LAYOUTS:
        ranks, parallel = LAYOUTS[layout]
        yield Launch(
            check="resume", case=layout, ranks=ranks, jobs=resume_jobs(inputs, out / "resume" / layout, parallel)
        )
    for name, (layout, tp) in ENGINES.items():
        ranks, parallel = LAYOUTS[layout]
        yield Launch(
            check="engine", case=name, ranks=ranks, jobs=[engine_job(inputs, out / "engine" / name, parallel, tp)]
        )
    for layout in MEMORY_LAYOUTS:
        ranks, parallel = LAYOUTS[layout]
        for job in memory_jobs(inputs, out / "memory" / layout, parallel):
            yield Launch(check="memory", case=f"{job.name} {layout}", ranks=ranks, jobs=[job])


def _with_local_layers(jobs: Sequence[Job], machine: Machine) -> Iterator[Job]:
    """With TransformerEngine installed, each job with its layers and with ours: where only one of them is wrong, it is
    known which."""
    for job in jobs:
        yield job
        if machine.transformer_engine:
            yield replace(job, layers="local")
