"""Messages and bytes of one training step of each layout, against the known formulas: `make bench-parallel`.

Each layout trains a small model (`sft`, fp32, packed rows, equal lengths) on real ranks over gloo, with a process group
that writes down what it is handed (`rehearsal/recorded.py`). What is counted in the second of three steps has to be, on
each rank, for each operation and group, what `parallel_formula.py` says of this program: count and bytes, exactly. Next
to it stands what published sources say. Each difference has a name and a reason there.

The same ranks are rehearsed, and have to say the same messages.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, machine
from benchmarks.parallel_formula import DIFFERENCES, Layout, Ranks, Term, Work, terms
from benchmarks.rehearsal.cases import MODELS, Case, job_of
from benchmarks.rehearsal.processes import as_ranks, together
from benchmarks.rehearsal.real_run import RandomNumbers, Seen, routed
from benchmarks.rehearsal.recorded import BACKEND, Recorder, join_again
from benchmarks.rehearsal.rehearsed_run import rehearsed_rank
from megarlhf.layout import MeshLayout
from megarlhf.parallel.mesh import forget_scratch_buffer
from megarlhf.rehearsal.fakes.lengths import Constant
from megarlhf.rehearsal.fakes.phases import Steps, StopRehearsal
from megarlhf.rehearsal.job import Job
from megarlhf.runtime import Runtime
from megarlhf.trainers.entries import import_entry
from megarlhf.trainers.run.factories import RunFactories

RESULT = ROOT / "benchmarks" / "results" / "parallel.json"
PROMPT, RESPONSE, SEQUENCES = 32, 64, 8
"""Tokens of each; sequences of a micro-batch."""
STEPS, LOOKED_AT = 3, 2
Count = tuple[int, int]
"""Messages, bytes."""
Counts = dict[tuple[str, Ranks], Count]
"""By operation and ranks."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A layout that is counted."""

    name: str
    parallel: dict[str, Any] = field(default_factory=dict)
    world_size: int
    model: str = "dense"
    distributed: bool = True
    layers: int = 4
    micro_batches: int = 4
    """On all data-parallel ranks together."""

    def layout(self) -> Layout:
        tp, cp, pp, ep = (int(self.parallel.get(axis, 1)) for axis in ("tp", "cp", "pp", "ep"))
        together = bool(self.parallel.get("sequence_parallel", tp > 1))
        mesh = MeshLayout(tp=tp, cp=cp, pp=pp, ep=ep, dp=self.world_size // (tp * cp * pp))
        vpp = int(self.parallel.get("vpp", 1))
        return Layout(mesh=mesh, vpp=vpp, sequence_parallel=together, distributed=self.distributed)

    def work(self) -> Work:
        config = MODELS[self.model]
        experts = int(config.get("num_experts", 0))
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return Work(
            hidden=hidden,
            layers=self.layers,
            heads=heads,
            groups=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim", hidden // heads)),
            intermediate=int(config["moe_intermediate_size" if experts else "intermediate_size"]),
            vocab=int(config["vocab_size"]),
            tied=bool(config["tie_word_embeddings"]),
            experts=experts,
            topk=int(config.get("num_experts_per_tok", 0)),
            qk_norms=config["model_type"].startswith("qwen3"),
            tokens=SEQUENCES * (PROMPT + RESPONSE),
            responses=SEQUENCES * RESPONSE,
            micro_batches=self.micro_batches // self.layout().mesh.dp,
        )

    def job(self, directory: Path) -> Job:
        case = Case(
            command="sft",
            parallel=self.parallel,
            world_size=self.world_size,
            model=self.model,
            packed=True,
            layers=self.layers,
            samples=SEQUENCES * self.micro_batches,
            distributed=self.distributed,
        )
        lengths = {"prompt_lengths": Constant(PROMPT), "response_lengths": Constant(RESPONSE)}
        return job_of(case, directory, STEPS, **lengths)


WHOLE = {"sequence_parallel": False}
LAYOUTS = (
    Measured(name="TP2", parallel={"tp": 2, **WHOLE}, world_size=2),
    Measured(name="TP4", parallel={"tp": 4, **WHOLE}, world_size=4),
    Measured(name="TP2 SP", parallel={"tp": 2}, world_size=2),
    Measured(name="PP2", parallel={"pp": 2}, world_size=2),
    Measured(name="PP2, tied embeddings", parallel={"pp": 2}, world_size=2, model="tied"),
    Measured(name="PP4", parallel={"pp": 4}, world_size=4),
    Measured(name="PP2 VPP2", parallel={"pp": 2, "vpp": 2}, world_size=2),
    Measured(name="CP2", parallel={"cp": 2}, world_size=2),
    Measured(name="DP2", world_size=2),
    Measured(name="DP2, plain optimizer", world_size=2, distributed=False),
    Measured(name="DP4", world_size=4),
    Measured(name="DP4, plain optimizer", world_size=4, distributed=False),
    Measured(name="EP2", parallel={"ep": 2}, world_size=2, model="experts"),
    Measured(name="TP2 EP2 SP", parallel={"tp": 2, "ep": 2}, world_size=4, model="experts"),
    Measured(name="TP2 x PP2", parallel={"tp": 2, "pp": 2, **WHOLE}, world_size=4),
    Measured(name="TP2 x DP2", parallel={"tp": 2, **WHOLE}, world_size=4),
    Measured(name="PP2 x DP2", parallel={"pp": 2}, world_size=4),
    Measured(name="TP2 x PP2 VPP2", parallel={"tp": 2, "pp": 2, "vpp": 2, **WHOLE}, world_size=4),
    Measured(name="TP2 x PP2 VPP2 SP", parallel={"tp": 2, "pp": 2, "vpp": 2}, world_size=4),
)


def count_rank(runtime: Runtime, job: Job) -> Seen:
    """Run this rank of the job, and count its messages. Collective."""
    now = [(0, "build")]
    recorder = Recorder(lambda: now[0])
    join_again(recorder)
    forget_scratch_buffer()

    def moved(step: int, phase: str) -> None:
        now[0] = step, phase

    steps = Steps(job.num_steps, moved, lambda step: None)
    parts = RunFactories(phases=steps.phases, weights=RandomNumbers(lambda shard: None))
    run = import_entry(job.command)
    recorder.on = True
    with routed(job.routing), contextlib.suppress(StopRehearsal):
        run(job.cfg, replace(runtime, backend=BACKEND), parts)
    return Seen(runtime.rank, {}, dict(recorder.counts), dict(recorder.nbytes))


def counts_of(seen: Seen) -> Counts:
    """Of the step that is looked at; without groups of one rank, in which nothing moves."""
    messages, nbytes = Counter[tuple[str, Ranks]](), Counter[tuple[str, Ranks]]()
    for message, count in seen.counts.items():
        if message.step == LOOKED_AT and len(message.ranks) > 1:
            to_one = message.operation in ("send", "receive")
            key = message.operation, message.ranks[-2:] if to_one else message.ranks
            messages[key] += count
            nbytes[key] += seen.nbytes[message]
    return {key: (count, nbytes[key]) for key, count in messages.items()}


def formula_of(found: Sequence[Term]) -> Counts:
    """What this program should say, by operation and group."""
    messages, nbytes = Counter[tuple[str, Ranks]](), Counter[tuple[str, Ranks]]()
    for term in found:
        if term.ours:
            messages[term.operation, term.ranks] += term.ours
            nbytes[term.operation, term.ranks] += term.ours_bytes
    return {key: (count, nbytes[key]) for key, count in messages.items()}


def unexplained(measured: Measured, seen: Sequence[Seen]) -> list[str]:
    """Messages that were counted and are not in the formula, or the other way round; in words."""
    lines = []
    for each in seen:
        counted = counts_of(each)
        expected = formula_of(terms(measured.work(), measured.layout(), each.rank))
        for key in sorted(counted.keys() | expected.keys()):
            ours, formula = counted.get(key, (0, 0)), expected.get(key, (0, 0))
            if ours != formula:
                lines.append(f"rank {each.rank}, {key[0]} in {key[1]}: counted {ours}, expected {formula}")
    return lines


def summary(measured: Measured) -> dict[str, Any]:
    """Of all ranks together: each kind of message."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for rank in measured.layout().mesh.ranks:
        for term in terms(measured.work(), measured.layout(), rank):
            sums = kinds.setdefault((term.name, term.operation), [0, 0, 0, 0])
            for place, value in enumerate((term.known, term.ours, term.known_bytes, term.ours_bytes)):
                sums[place] += value
    names = ("formula_messages", "messages", "formula_bytes", "bytes")
    total = [sum(sums[place] for sums in kinds.values()) for place in range(4)]
    pairs = ((name, sums[0::2], sums[1::2]) for (name, _), sums in kinds.items())
    differences = dict.fromkeys(name for name, formula, ours in pairs if formula != ours)
    return {
        **dict(zip(names, total, strict=True)),
        "differences": {name: _difference(kinds, name) for name in differences},
        "kinds": [{"kind": k, "operation": o, **dict(zip(names, sums, strict=True))} for (k, o), sums in kinds.items()],
    }


def _difference(kinds: dict[tuple[str, str], list[int]], name: str) -> list[int]:
    """Messages and bytes more than in the formula."""
    of_name = [sums for (kind, _), sums in kinds.items() if kind == name]
    return [sum(s[1] - s[0] for s in of_name), sum(s[3] - s[2] for s in of_name)]


def measure(measured: Measured) -> dict[str, Any]:
    """Run and rehearse a layout. Raises: AssertionError where a message is not in the formula."""
    with tempfile.TemporaryDirectory() as directory:
        job = measured.job(Path(directory) / "job")
        seen = as_ranks(measured.world_size, count_rank, job)
        told = together(rehearsed_rank, [(job, rank) for rank in range(measured.world_size)])
    lines = unexplained(measured, seen)
    assert not lines, f"{measured.name}: messages that the formula does not have:\n" + "\n".join(lines)
    unlike = sum(counts_of(ran) != counts_of(heard) for ran, heard in zip(seen, told, strict=True))
    return {**summary(measured), "ranks": measured.world_size, "ranks_rehearsed_otherwise": unlike}


def table(result: dict[str, Any]) -> str:
    """For the page."""
    head = "| layout | messages: formula | ours | kB: formula | ours | what differs |\n|---|---|---|---|---|---|\n"
    numbers = {name: number for number, name in enumerate(DIFFERENCES, 1)}
    rows = []
    for name, each in result["layouts"].items():
        signs = ", ".join(str(number) for number in sorted(numbers[kind] for kind in each["differences"]))
        sizes = [f"{each[key] / 1000:,.1f}" for key in ("formula_bytes", "bytes")]
        cells = [name, each["formula_messages"], each["messages"], *sizes, signs]
        rows.append("| " + " | ".join(map(str, cells)) + " |\n")
    return head + "".join(rows)


def reasons() -> str:
    """For the page: the differences by their numbers."""
    return "".join(f"{number}. {name}: {why}.\n" for number, (name, why) in enumerate(DIFFERENCES.items(), 1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[each.name for each in LAYOUTS], help="default: all")
    parser.add_argument("--markdown", action="store_true", help="print the page's tables of the result that is there")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.markdown:
        print(table(json.loads(arguments.out.read_text(encoding="utf-8"))) + "\n" + reasons())
        return
    if arguments.only and arguments.out == RESULT:
        parser.error("a part is no result: give --out")
    layouts = {}
    for each in LAYOUTS:
        if arguments.only and each.name not in arguments.only:
            continue
        began = time.monotonic()
        found = layouts[each.name] = measure(each)
        words = f"{found['messages']} messages, formula {found['formula_messages']}; {found['bytes']} bytes, formula "
        words += f"{found['formula_bytes']}; ranks rehearsed otherwise {found['ranks_rehearsed_otherwise']}"
        print(f"{each.name:24s} {words} ({time.monotonic() - began:.0f} s)", flush=True)
    result = {
        "layouts": layouts,
        "differences": DIFFERENCES,
        "work": dataclasses.asdict(LAYOUTS[0].work()),
        "machine": machine("make bench-parallel"),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
