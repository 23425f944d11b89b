"""The resharder against all-gather per tensor and against the floor: gloo, four processes. `make bench-reshard`.

A random Llama of 0.75 billion bf16 parameters goes from a trainer's layout into two engines of two ranks. All of it in
one run, interleaved: each round does it three ways, each between barriers; a time is that of the slowest rank, ratios
are of medians.

ours       the copy plan in buckets of 32 MB, local boxes copied, written in place
allgather  what trainers commonly do: for each parameter a broadcast over the pipeline and an all-gather over tensor
           parallelism, the Hugging Face tensors made on every rank, and each rank cutting its part out of them
floor      one flat message per pair of ranks with as many bytes as the plan sends: no gather, no scatter, and nothing
           copied inside a rank
local      what the plan copies inside ranks, alone: the floor has none of it, and no way of ours avoids it

After the rounds, as often: the certificate, that every rank's parameters are the trainer's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.machine import OVER, ROOT, machine
from benchmarks.peers import AnonymousPeak
from benchmarks.random_llama import CONFIG
from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import hf_placements, padded_vocab_size, vllm_placements
from megarlhf.layout import MeshLayout, engine_order
from megarlhf.placement import Placement, RankPlacements
from megarlhf.runtime import free_port
from megarlhf.weights.checks.certificate import certify
from megarlhf.weights.plan.copy_plan import Copy, CopyPlan, make_plan
from megarlhf.weights.plan.traffic import least_receive
from megarlhf.weights.transport.reshard import Resharder
from megarlhf.weights.transport.storages import copy_local

RESULT = ROOT / "benchmarks" / "results" / "reshard.json"
RANKS, ENGINE_TP, DTYPE, BUCKET_BYTES = 4, 2, torch.bfloat16, 32 << 20
LAYOUTS = {"tp2_pp2_to_tp2": (2, 2), "tp4_to_tp2": (4, 1)}
WAYS = ("ours", "allgather", "floor", "local")

Live = dict[str, torch.Tensor]


class AllGather:
    """Every parameter to every rank, as the Hugging Face tensors it holds; each rank takes its part."""

    def __init__(
        self, arch: Architecture, mesh: MeshLayout, src: Sequence[RankPlacements], mine: RankPlacements
    ) -> None:
        self._at = mesh.coordinates(mine.rank)
        groups = {
            axis: [(r, dist.new_group(list(r), sort_ranks=False)) for r in mesh.groups([axis])] for axis in ("tp", "pp")
        }
        self._group = {a: next(g for ranks, g in made if mine.rank in ranks) for a, made in groups.items()}
        self._mesh = mesh
        whole = hf_placements(arch, rank=RANKS)
        into = make_plan([whole], [mine]).copies
        self._steps: list[tuple[int, str, tuple[int, ...], dict[str, tuple[int, ...]], Sequence[Copy], list[Copy]]] = []
        for stage in range(mesh.pp):
            parts = [src[mesh.rank_at(tp=t, pp=stage)] for t in range(mesh.tp)]
            for storage, shape in parts[0].storages.items():
                shards = [_only(part, storage).on_rank(t) for t, part in enumerate(parts)]
                names = {p.tensor for shard in shards for p in shard.placements}
                gather = make_plan(shards, [whole.select(names)]).copies
                scatter = [copy for copy in into if copy.tensor in names]
                self._steps.append((stage, storage, shape, {n: whole.tensors[n] for n in names}, gather, scatter))

    def __call__(self, live: Live, out: Live) -> None:
        for stage, storage, shape, tensors, gather, scatter in self._steps:
            shard = live[storage] if stage == self._at.pp else torch.empty(shape, dtype=DTYPE)
            if self._mesh.pp > 1:
                dist.broadcast(shard, self._mesh.rank_at(tp=self._at.tp, pp=stage), group=self._group["pp"])
            shards = [torch.empty_like(shard) for _ in range(self._mesh.tp)]
            dist.all_gather(shards, shard, group=self._group["tp"])
            made = {name: torch.empty(size, dtype=DTYPE) for name, size in tensors.items()}
            for copy in gather:
                copy_local([copy], {storage: shards[copy.src_rank]}, made)
            copy_local(scatter, made, out)


def _only(part: RankPlacements, storage: str) -> RankPlacements:
    placements: tuple[Placement, ...] = tuple(p for p in part.placements if p.storage == storage)
    return RankPlacements(part.rank, {storage: part.storages[storage]}, placements, part.tensors)


class Floor:
    """The plan's bytes as one message per pair."""

    def __init__(self, plan: CopyPlan, rank: int) -> None:
        # Written once: pages that never were are all the same page, which stays in the cache.
        self._sends = {d: torch.ones(n, dtype=DTYPE) for (s, d), n in plan.traffic.items() if s == rank != d}
        self._receives = {s: torch.ones(n, dtype=DTYPE) for (s, d), n in plan.traffic.items() if d == rank != s}

    def __call__(self) -> None:
        ops = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in self._receives.items()]
        ops += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in self._sends.items()]
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


def random_storages(part: RankPlacements) -> Live:
    """The same norms on every rank, other values in all else."""
    generator = torch.Generator().manual_seed(part.rank)
    return {
        name: torch.ones(shape, dtype=DTYPE) if len(shape) == 1 else torch.randn(shape, generator=generator).to(DTYPE)
        for name, shape in part.storages.items()
    }


def rank_main(rank: int, port: int, name: str, rounds: int, config: Mapping[str, Any], out: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    arch = architecture_from_hf(config)
    tp, pp = LAYOUTS[name]
    mesh = MeshLayout(tp=tp, pp=pp, dp=RANKS // (tp * pp))
    mesh = MeshLayout(tp=tp, pp=pp, dp=mesh.dp, order=engine_order(mesh, ENGINE_TP, RANKS))
    src = MegatronLayout(tp=tp, pp=pp, padded_vocab=padded_vocab_size(arch.vocab_size, tp)).on_ranks(arch, mesh)
    dst = [vllm_placements(arch, tp=ENGINE_TP, tp_rank=r % ENGINE_TP, rank=r) for r in range(RANKS)]
    live = random_storages(src[rank])
    into, other = ({n: torch.zeros(s, dtype=DTYPE) for n, s in dst[rank].storages.items()} for _ in range(2))
    plan = make_plan(src, dst, only_rank=rank)
    resharder = Resharder(plan, rank=rank, dtype=DTYPE, device=torch.device("cpu"), bucket_bytes=BUCKET_BYTES)
    allgather, floor = AllGather(arch, mesh, src, dst[rank]), Floor(plan, rank)
    peaks = {}
    for way, action in (("ours", lambda: resharder.run(live, into)), ("allgather", lambda: allgather(live, other))):
        with AnonymousPeak() as peak:
            timed(action)
        peaks[way] = peak.peak_bytes
    if different := [n for n in into if not torch.equal(into[n], other[n])]:
        raise RuntimeError(f"rank {rank}: the two ways disagree on {different}")
    ways = {
        "ours": lambda: resharder.run(live, into),
        "floor": floor,
        "local": lambda: copy_local(plan.local(rank), live, into),
        "allgather": lambda: allgather(live, other),
    }
    # To and fro: ours and the floor stand side by side, and neither always comes first.
    orders = [list(ways), list(reversed(ways))]
    seconds = [{way: timed(ways[way]) for way in orders[number % 2]} for number in range(rounds)]
    prove = partial(certify, plan, src, dst, live, into, rank=rank, dtype=DTYPE, version=0)
    certificates = [timed(prove) for _ in range(rounds)]
    reports: list[Any] = [None] * RANKS
    least = least_receive(src, dst)[rank]
    dist.all_gather_object(reports, {"peak": peaks, "received": plan.elements_received(rank), "least": least})
    if rank == 0:
        out.write_text(
            json.dumps({"rounds": seconds, "ranks": reports, "order": mesh.order, "certificates": certificates})
        )
    dist.destroy_process_group()


def summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Of one layout."""
    spread = {
        way: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for way in WAYS
        if (values := [seconds[way] for seconds in measured["rounds"]])
    }
    ours = spread["ours"]["median"]
    received, least = (sum(rank[key] for rank in measured["ranks"]) for key in ("received", "least"))
    return {
        "allgather_over_ours": spread["allgather"]["median"] / ours,
        "ours_over_floor": ours / spread["floor"]["median"],
        "received_over_minimum": received / least,
        "ours_over_floor_and_local": ours / (spread["floor"]["median"] + spread["local"]["median"]),
        "peak_extra_bytes": max(rank["peak"]["ours"] for rank in measured["ranks"]),
        "peak_extra_bytes_allgather": max(rank["peak"]["allgather"] for rank in measured["ranks"]),
        "received_bytes": [rank["received"] * DTYPE.itemsize for rank in measured["ranks"]],
        "order": measured["order"],
        "seconds_certificate": statistics.median(measured["certificates"]),
        "seconds": spread,
        "rounds": measured["rounds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    layouts = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in LAYOUTS:
            result_file = Path(folder) / name
            mp.spawn(rank_main, (free_port(), name, arguments.rounds, CONFIG, result_file), nprocs=RANKS)
            layouts[name] = summary(json.loads(result_file.read_text()))
    result = {
        "allgather_over_ours": min(layout["allgather_over_ours"] for layout in layouts.values()),
        "ours_over_floor": max(layout["ours_over_floor"] for layout in layouts.values()),
        "received_over_minimum": max(layout["received_over_minimum"] for layout in layouts.values()),
        "peak_extra_bytes": max(layout["peak_extra_bytes"] for layout in layouts.values()),
        "bucket_bytes": BUCKET_BYTES,
        "layouts": layouts,
        "direction": OVER,
        "machine": machine("make bench-reshard"),
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    for name, layout in layouts.items():
        print(name, {key: round(layout[key], 3) for key in list(layout)[:5]})


if __name__ == "__main__":
    main()
