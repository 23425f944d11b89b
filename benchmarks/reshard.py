"""The resharder against all-gather per tensor and against the floor: gloo, four processes. `make bench-reshard`.

A random Llama of 0.75 billion bf16 parameters goes from a trainer's layout into engines of two ranks, interleaved in
one run: each round does it three ways, between barriers; a time is that of the slowest rank; ratios are of medians.

ours       the copy plan in buckets of 32 MB, local boxes copied, written in place
allgather  what trainers commonly do: for each parameter a broadcast over the pipeline and an all-gather over tensor
           parallelism, the Hugging Face tensors made on every rank, and each rank cutting its part out of them
floor      one flat message per pair of ranks with as many bytes as the plan sends, no gather, no scatter
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.random_llama import CONFIG
from megarlhf.runtime import free_port
from megarlhf.weights.architecture import Architecture
from megarlhf.weights.carry import copy_local
from megarlhf.weights.placement import RankPlacements
from megarlhf.weights.plan import CopyPlan, make_plan
from megarlhf.weights.reshard import Resharder
from megarlhf.weights.tensor_map import hf_placements, megatron_placements, padded_vocab_size, vllm_placements

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "reshard.json"
RANKS, ENGINE_TP, DTYPE = 4, 2, torch.bfloat16
LAYOUTS = {"tp2_pp2_to_tp2": (2, 2), "tp4_to_tp2": (4, 1)}


def sources(arch: Architecture, tp: int, pp: int) -> list[RankPlacements]:
    layers = arch.num_layers // pp
    return [
        megatron_placements(
            arch,
            tp=tp,
            tp_rank=rank % tp,
            layers=range(rank // tp * layers, (rank // tp + 1) * layers),
            first_stage=rank < tp,
            last_stage=rank >= tp * (pp - 1),
            padded_vocab=padded_vocab_size(arch.vocab_size, tp),
            rank=rank,
        )
        for rank in range(tp * pp)
    ]


def destinations(arch: Architecture) -> list[RankPlacements]:
    return [vllm_placements(arch, tp=ENGINE_TP, tp_rank=rank % ENGINE_TP, rank=rank) for rank in range(RANKS)]


class AllGather:
    """Every parameter to every rank, as the Hugging Face tensors it holds; each rank takes its part."""

    def __init__(
        self, arch: Architecture, tp: int, pp: int, src: Sequence[RankPlacements], mine: RankPlacements
    ) -> None:
        self.rank, self.tp, self.pp = dist.get_rank(), tp, pp
        tp_groups = [dist.new_group(list(range(p * tp, (p + 1) * tp))) for p in range(pp)]
        pp_groups = [dist.new_group(list(range(t, RANKS, tp))) for t in range(tp)]
        self.tp_group, self.pp_group = tp_groups[self.rank // tp], pp_groups[self.rank % tp]
        whole = hf_placements(arch, rank=100)
        into = make_plan([whole], [mine], only_rank=mine.rank)
        self.steps = []
        for stage in range(pp):
            parts = src[stage * tp : (stage + 1) * tp]
            for storage, shape in parts[0].storages.items():
                names = {p.tensor for part in parts for p in part.placements if p.storage == storage}
                # The shards of the group as ranks of a plan of their own: what a peer's export knows by name.
                shards = [
                    RankPlacements(
                        t,
                        {storage: part.storages[storage]},
                        tuple(p for p in part.placements if p.storage == storage),
                        part.tensors,
                    )
                    for t, part in enumerate(parts)
                ]
                gather = make_plan(shards, [whole.select(names)])
                scatter = [copy for copy in into.copies if copy.tensor in names]
                self.steps.append((stage, storage, shape, {n: whole.tensors[n] for n in names}, gather.copies, scatter))

    def __call__(self, live: dict[str, torch.Tensor], out: dict[str, torch.Tensor]) -> None:
        stage_of = self.rank // self.tp
        for stage, storage, shape, tensors, gather, scatter in self.steps:
            shard = live[storage] if stage == stage_of else torch.empty(shape, dtype=DTYPE)
            if self.pp > 1:
                dist.broadcast(shard, stage * self.tp + self.rank % self.tp, group=self.pp_group)
            shards = [torch.empty_like(shard) for _ in range(self.tp)]
            dist.all_gather(shards, shard, group=self.tp_group)
            made = {name: torch.empty(size, dtype=DTYPE) for name, size in tensors.items()}
            for copy in gather:
                copy_local([copy], {storage: shards[copy.src_rank]}, made)
            copy_local(scatter, made, out)


class Floor:
    """The plan's bytes as one message per pair."""

    def __init__(self, plan: CopyPlan) -> None:
        rank = dist.get_rank()
        self.sends = {d: torch.zeros(n, dtype=DTYPE) for (s, d), n in plan.traffic.items() if s == rank != d}
        self.receives = {s: torch.zeros(n, dtype=DTYPE) for (s, d), n in plan.traffic.items() if d == rank != s}

    def __call__(self) -> None:
        ops = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in self.receives.items()]
        ops += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in self.sends.items()]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()


def timed(action: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def rank_main(
    rank: int, port: int, layout: str, rounds: int, bucket_bytes: int, config: dict[str, Any], out: Path
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    arch = Architecture.from_hf(config)
    tp, pp = LAYOUTS[layout]
    src, dst = sources(arch, tp, pp), destinations(arch)
    generator = torch.Generator().manual_seed(rank)
    live = {n: torch.randn(s, generator=generator).to(DTYPE) for n, s in src[rank].storages.items()}
    for name, value in live.items():  # norms are the same on every rank
        if value.dim() == 1:
            live[name] = torch.ones_like(value)
    into, other = ({n: torch.zeros(s, dtype=DTYPE) for n, s in dst[rank].storages.items()} for _ in range(2))
    plan = make_plan(src, dst, only_rank=rank)
    allgather, floor = AllGather(arch, tp, pp, src, dst[rank]), Floor(plan)

    resharder = Resharder(
        plan, rank=rank, dtype=DTYPE, device=torch.device("cpu"), in_place=True, bucket_bytes=bucket_bytes
    )

    def ours() -> None:
        resharder.run(live, into)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours()
    extra = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    allgather(live, other)
    same = all(torch.equal(into[name], other[name]) for name in into)
    assert same, "the two ways disagree"
    found = [
        {"ours": timed(ours), "allgather": timed(lambda: allgather(live, other)), "floor": timed(floor)}
        for _ in range(rounds)
    ]
    facts = [None] * RANKS
    received = plan.elements_received(rank)
    held = {rank: src[rank]}
    dist.all_gather_object(facts, (extra, received))
    if rank == 0:
        out.write_text(json.dumps({"rounds": found, "facts": facts}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("/tmp/reshard.json"))
    arguments = parser.parse_args()
    for layout in LAYOUTS:
        mp.spawn(rank_main, (free_port(), layout, arguments.rounds, 32 << 20, CONFIG, arguments.out), nprocs=RANKS)
        found = json.loads(arguments.out.read_text())
        med = {k: statistics.median(r[k] for r in found["rounds"]) for k in found["rounds"][0]}
        print(layout, med, med["allgather"] / med["ours"], med["ours"] / med["floor"], found["facts"])


if __name__ == "__main__":
    main()
