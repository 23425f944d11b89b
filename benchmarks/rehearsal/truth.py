"""What rehearsed ranks say about memory and messages, held against real ones: `python -m benchmarks.rehearsal.truth`.

Memory: the most bytes that live in each phase of each step, on each rank. Real: every allocation of torch's allocator,
which on a CPU is one for the tensors of the device and of the host. Rehearsed: the tensors of the device. So tensors
that a run has on the host only (the rows of data, lengths, masks before they are moved) count as an error of the
rehearsal here; they are small. A phase that only one of the two has is an error of 100%.
Messages: count and bytes by step, phase, operation and group; all have to be equal. But for the tokens that travel to
experts: a rehearsed rank takes its expert-parallel neighbours to have as many as itself, while packed rows differ a
little in length. There the bytes may differ by 2%, and the largest difference is told.

Not measured here, on either side: what gloo and oneDNN take by malloc, and what Python objects take.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rehearsal.cases import CACHE, Case, job_of
from benchmarks.rehearsal.processes import as_ranks, together
from benchmarks.rehearsal.real_run import Seen, real_rank
from benchmarks.rehearsal.recorded import Message
from benchmarks.rehearsal.rehearsed_run import rehearsed_rank

WHOLE = {"sequence_parallel": False}
TP2, PP2, TP2_PP2 = {"tp": 2} | WHOLE, {"pp": 2}, {"tp": 2, "pp": 2} | WHOLE
CP2 = {"cp": 2}
UNEVEN = {"pp": 2, "layers_per_stage": [3, 1]}
VPP2 = {"pp": 2, "vpp": 2}
SEQUENCE = {"tp": 2, "sequence_parallel": True}
GRPO = "group_relative"
AWAY: dict[str, Any] = {"parameters": True, "optimizer": True}
STREAMED: dict[str, Any] = {"parameters": True, "optimizer": "stream"}
CASES: tuple[Case, ...] = (
    Case(command="sft"),
    Case(command="sft", dtype="bf16", packed=True),
    Case(command="sft", parallel=TP2, world_size=2, packed=True),
    Case(command="sft", parallel=PP2, world_size=2, dtype="bf16"),
    Case(command="sft", world_size=2, dtype="bf16"),
    Case(command="sft", parallel=TP2_PP2, world_size=4, packed=True),
    Case(command="sft", model="experts"),
    Case(command="sft", model="experts", skew=2.0, parallel=PP2, world_size=2, dtype="bf16", packed=True),
    Case(command="rm"),
    Case(command="rm", parallel=SEQUENCE, world_size=2, dtype="bf16", packed=True),
    Case(command="rm", world_size=2, packed=True),
    Case(command="sft", model="tied", parallel=PP2, world_size=2),
    Case(command="sft", model="window", packed=True),
    Case(command="sft", model="learned", dtype="bf16"),
    Case(command="dpo", parallel=TP2, world_size=2, dtype="bf16", packed=True),
    Case(command="dpo", parallel={"pp": 3}, world_size=3, dtype="bf16", packed=True, layers=15, samples=64),
    Case(command="rl"),
    Case(command="rl", parallel=UNEVEN, world_size=2, packed=True),
    Case(command="rl", parallel=TP2_PP2, world_size=4, dtype="bf16"),
    Case(command="rl", world_size=2, dtype="bf16", packed=True),
    Case(command="rl", advantage=GRPO, dtype="bf16", packed=True),
    Case(command="rl", advantage=GRPO, parallel={"pp": 3}, world_size=3, packed=True, layers=15),
    Case(command="rl", advantage=GRPO, parallel=SEQUENCE, world_size=2),
    Case(command="rl", advantage=GRPO, parallel=PP2, world_size=2, engine_tp=2, dtype="bf16", packed=True),
    Case(command="rl", advantage=GRPO, model="experts", parallel=SEQUENCE, world_size=2, engine_tp=1),
    Case(command="rl", advantage=GRPO, model="experts", parallel=SEQUENCE, world_size=2, packed=True),
    Case(command="sft", parallel=PP2, world_size=2, dtype="bf16", packed=True, recompute="full"),
    Case(command="sft", parallel=SEQUENCE, world_size=2, recompute="core_attention"),
    Case(command="sft", parallel=PP2, world_size=2, dtype="bf16", packed=True, recompute="layers"),
    Case(command="sft", parallel=VPP2, world_size=2, dtype="bf16", packed=True),
    Case(command="sft", model="tied", parallel=VPP2 | SEQUENCE, world_size=4, packed=True, recompute="full"),
    Case(command="rl", parallel=VPP2, world_size=2, packed=True),
    Case(command="sft", model="experts", dtype="bf16", packed=True, recompute="full"),
    Case(command="sft", model="experts", parallel={"ep": 2}, world_size=2, dtype="bf16", packed=True),
    Case(command="sft", model="experts", skew=2.0, parallel=SEQUENCE | {"ep": 2}, world_size=4, packed=True),
    Case(command="rl", advantage=GRPO, model="experts", parallel={"ep": 2}, world_size=2, dtype="bf16", packed=True),
    Case(command="sft", model="balanced", dtype="bf16", packed=True),
    Case(command="sft", model="balanced", parallel=SEQUENCE | {"ep": 2}, world_size=4, recompute="full"),
    Case(command="rl", dtype="bf16", packed=True, offload=AWAY),
    Case(command="rl", world_size=2, dtype="bf16", packed=True, recompute="full", offload=STREAMED),
    Case(command="rl", parallel=TP2_PP2, world_size=4, frozen={"tp": 2, "ranks": [1, 3]}),
    Case(command="rl", advantage=GRPO, parallel=TP2, world_size=2, engine_tp=2, dtype="bf16", offload=STREAMED),
    Case(command="sft", parallel=CP2, world_size=2, packed=True),
    Case(command="sft", model="window", parallel=CP2, world_size=2),
    Case(command="rl", parallel=CP2, world_size=2, dtype="bf16", packed=True),
    Case(command="rl", advantage=GRPO, parallel={"tp": 2, "cp": 2}, world_size=4, engine_tp=2, packed=True),
    Case(command="rm", packed=True),
    Case(command="rm", parallel=PP2, world_size=2, packed=True),
    Case(command="rl", advantage=GRPO, parallel=SEQUENCE, world_size=2, dtype="bf16", packed=True),
    Case(command="rl", advantage=GRPO, parallel=TP2, world_size=2, packed=True, recompute="core_attention"),
    Case(command="rl", advantage=GRPO, parallel=PP2, world_size=2, packed=True),
    Case(command="rl", advantage=GRPO, world_size=2, dtype="bf16", packed=True),
    Case(command="rl", advantage=GRPO, world_size=2, dtype="bf16", packed=True, shares=False),
    Case(command="rl", advantage=GRPO, model="window", packed=True),
    Case(command="rl", advantage=GRPO, model="learned", dtype="bf16", packed=True),
    Case(command="rl", advantage=GRPO, dtype="bf16", packed=True, slices=3),
    Case(command="rl", parallel=PP2, world_size=2, dtype="bf16", packed=True, slices=3),
    Case(command="rl", advantage=GRPO, parallel=TP2, world_size=2, engine_tp=1, packed=True, slices=3),
    Case(command="rl", advantage=GRPO, world_size=2, engine_tp=2, dtype="bf16", offload=STREAMED, slices=3),
)


EXCHANGE_TOLERANCE = 0.02
"""Of bytes between expert-parallel ranks."""


class Row(NamedTuple):
    """A phase of a rank."""

    configuration: str
    rank: int
    step: int
    phase: str
    real: int
    """Bytes."""
    rehearsed: int

    @property
    def error(self) -> float:
        """Of the real peak."""
        return abs(self.rehearsed - self.real) / max(self.real, 1) if self.real and self.rehearsed else 1.0


class Mismatch(NamedTuple):
    """Messages that the two do not have alike."""

    configuration: str
    rank: int
    message: Message
    real: tuple[int, int]
    """Count, bytes."""
    rehearsed: tuple[int, int]


@dataclass(frozen=True)
class Compared:
    """A configuration, run and rehearsed."""

    rows: list[Row]
    mismatches: list[Mismatch]
    num_messages: int
    """Of the real run, on all ranks."""
    exchange_error: float = 0.0
    """The largest of bytes between experts, of the real ones."""


def compare(configuration: str, real: Sequence[Seen], rehearsed: Sequence[Seen]) -> Compared:
    """Rank by rank, real runs with rehearsals of the same job."""
    rows, mismatches, num_messages, exchange_error = [], [], 0, 0.0
    for ran, told in zip(real, rehearsed, strict=True):
        assert ran.rank == told.rank, f"rank {ran.rank} would be compared with rank {told.rank}"
        for step, phase in sorted(ran.peaks.keys() | told.peaks.keys()):
            peaks = (_beside_cache(each.peaks.get((step, phase), 0)) for each in (ran, told))
            rows.append(Row(configuration, ran.rank, step, phase, *peaks))
        for message in sorted(ran.counts.keys() | told.counts.keys()):
            both = [(each.counts.get(message, 0), each.nbytes.get(message, 0)) for each in (ran, told)]
            off = abs(both[0][1] - both[1][1]) / max(both[0][1], 1)
            if both[0][0] == both[1][0] and message.operation == "all_to_all" and off <= EXCHANGE_TOLERANCE:
                exchange_error = max(exchange_error, off)
            elif both[0] != both[1]:
                mismatches.append(Mismatch(configuration, ran.rank, message, *both))
        num_messages += sum(ran.counts.values())
    return Compared(rows, mismatches, num_messages, exchange_error)


def _beside_cache(nbytes: int) -> int:
    """An engine's cache, as large as all else a hundred times, would hide every error."""
    return nbytes - CACHE if nbytes > CACHE else nbytes


def measure(case: Case) -> Compared:
    """Run a case on real ranks, and rehearse each of them."""
    with tempfile.TemporaryDirectory() as directory:
        job = job_of(case, Path(directory))
        real = as_ranks(case.world_size, real_rank, job)
        rehearsed = [together(rehearsed_rank, [(job, rank)])[0] for rank in range(case.world_size)]
    return compare(case.name, real, rehearsed)


def outcome(compared: Iterable[Compared]) -> dict[str, dict[str, Any]]:
    """A row for each job."""
    by_configuration: dict[str, dict[str, Any]] = {}
    for each in compared:
        worst = max(each.rows, key=lambda row: row.error)
        by_configuration[worst.configuration] = {
            "phases": len(each.rows),
            "error_max": worst.error,
            "worst": f"rank {worst.rank}, step {worst.step}, {worst.phase}",
            "peak_real": max(row.real for row in each.rows),
            "peak_rehearsed": max(row.rehearsed for row in each.rows),
            "messages": each.num_messages,
            "wire_mismatches": len(each.mismatches),
            "exchange_error": each.exchange_error,
        }
    return by_configuration


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """For `benchmarks/results/rehearsal.json`."""
    return {
        "memory_error_max": max(row["error_max"] for row in rows.values()),
        "wire_mismatches": sum(row["wire_mismatches"] for row in rows.values()),
        "truth": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="where the outcome is written as JSON")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    found = []
    for case in (case for case in CASES if options.only in case.name):
        began = time.monotonic()
        found.append(measure(case))
        told = outcome(found[-1:])[case.name]
        print(f"{case.name:48s} {told['error_max']:9.4%} {told['worst']:32s} {told['messages']:5d} messages, ", end="")
        print(f"{told['wire_mismatches']} unlike, experts {told['exchange_error']:.2%} ", end="")
        print(f"({time.monotonic() - began:.0f} s)", flush=True)
        for mismatch in found[-1].mismatches:
            print(f"    rank {mismatch.rank} {mismatch.message}: {mismatch.real}, rehearsed {mismatch.rehearsed}")
    result = summary(outcome(found))
    print(f"memory_error_max {result['memory_error_max']:.4%}, wire_mismatches {result['wire_mismatches']}")
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
