"""A rehearsal's answer that nobody has rehearsed: a Llama-3-70B PPO on 64 ranks, with figures of the right size."""

import math
from dataclasses import replace

from megarlhf.rehearsal.fake_device.ledger import LargeStorage
from megarlhf.rehearsal.result import (
    AssumptionRow,
    HostRow,
    MarginRow,
    MessageRow,
    PhaseRow,
    PhaseTime,
    RankResult,
    Reshard,
    Result,
    ResumePointRow,
    RolloutRow,
    StepTime,
)

GIB, MIB = 2**30, 2**20
BEFORE = ("between phases", "build", "reshard", "certificate")
STEP = (
    *("rollout", "reward", "score/actor", "score/reference", "score/critic", "score/reward_model", "advantages"),
    *("train/actor", "optimizer/actor", "train/critic", "optimizer/critic", "reshard", "certificate", "eval"),
    *("checkpoint", "between phases"),
)
PLACES = [(0, phase) for phase in BEFORE] + [(step, phase) for step in (1, 2) for phase in STEP]
STAGES = ("actor", "reference", "critic", "reward_model")
SECONDS = {"rollout": 210.0, "train/actor": 96.0, "train/critic": 93.0, "score/actor": 24.0, "reshard": 2.5}
SOURCE = "NVIDIA/nccl#1685"


def kinds_at(step, phase, rank):
    """Bytes by kind at the peak of a phase, in GiB: the state of an optimizer appears in its first update."""
    number = rank % 4
    gib = {
        "parameters": 8.15 + 0.4 * (number in (0, 3)), "gradients": 8.15, "main parameters": 4.08,
        "optimizer state": 8.16 if step == 2 else 0.0, "experience": 0.12 if step else 0.0,
    }  # fmt: skip
    if step == 1 and phase.startswith("optimizer"):
        gib["optimizer state"] = 4.08 if phase.endswith("actor") else 8.16
    name = phase.partition("/")[0]
    if name == "train":
        gib |= {"activations": 21.4 - 4.5 * number, "logits and kernels": 3.9 if number == 3 else 0.03}
        gib |= {"kernels' work space": 0.031}
    if name == "score":
        gib |= {"activations": 2.2, "logits and kernels": 1.9 if number == 3 else 0.0}
    if name == "optimizer":
        gib["optimizer's temporaries"] = 1.02
    if name in ("rollout", "eval", "reshard"):
        gib |= {"engine's weights": 16.4, "engine's cache": 22.5}
    if name in ("reshard", "checkpoint"):
        gib["buckets"] = 1.0
    if name == "certificate":
        gib["checks"] = 0.26
    if name == "build":
        gib["others"] = 0.012
    return {kind: int(size * GIB) for kind, size in gib.items() if size}


def storages(kinds):
    where = {
        "activations": "megatron/core/transformer/mlp.py:224 in forward",
        "engine's cache": "megarlhf/rehearsal/fakes/engine.py:140 in _cache",
        "gradients": "megatron/core/distributed/param_and_grad_buffer.py:612 in __init__",
    }
    return [
        LargeStorage(
            size // 2, kind, where.get(kind, "megarlhf/models/build.py:88 in build_model"), (size // 4,), "bfloat16"
        )
        for kind, size in sorted(kinds.items(), key=lambda item: -item[1])[:5]
    ]


def memory_of(rank):
    rows = []
    for step, phase in PLACES:
        kinds = kinds_at(step, phase, rank)
        peak, stays = sum(kinds.values()), kinds["parameters"] + kinds["gradients"]
        rows.append(
            PhaseRow(
                step=step, phase=phase, start=stays, peak=peak, end=stays + 5 * MIB, by_kind=kinds,
                largest=storages(kinds), host_peak=3 * GIB,
            )
        )  # fmt: skip
    return rows


def curve_of(rank, points):
    """So many points in each phase: up to its peak and down, as micro-batches are."""
    curve, borders, now = [], [], 0.0
    for step, phase in PLACES:
        seconds = SECONDS.get(phase, 1.5) if step else 0.2
        kinds = kinds_at(step, phase, rank)
        borders.append((now, step, phase))
        for number in range(points):
            share = abs(math.sin((number + 1) * math.pi / 8)) if points > 1 else 1.0
            passing = {
                kind: int(kinds[kind] * share) for kind in ("activations", "logits and kernels") if kind in kinds
            }
            curve.append((now + seconds * number / points, kinds | passing))
        now += seconds
    return curve, borders


def messages_of(rank):
    rows = []
    for step in (0, 1, 2):
        if step:
            for phase in ("train/actor", "train/critic"):
                rows += [
                    message(step, phase, "all_gather", "tp", 8, 4160 + rank, 540_000_000_000, near=True),
                    message(step, phase, "reduce_scatter", "tp", 8, 4160, 540_000_000_000, near=True),
                    message(step, phase, "send", "pp", 2, 130, 17_000_000_000),
                    message(step, phase, "receive", "pp", 2, 130, 17_000_000_000),
                    message(step, phase, "reduce_scatter", "dp", 2, 4, 35_000_000_000),
                ]
            rows.append(message(step, "rollout", "all_gather", "world", 64, 3, 120_000, host=True))
        rows.append(message(step, "reshard", "all_to_all", "world", 64, 40, 16_000_000_000))
    return rows


def message(step, phase, operation, group, size, count, nbytes, near=False, host=False):
    return MessageRow(
        step=step, phase=phase, operation=operation, group=group, size=size, between_nodes=not near, host=host,
        count=count, nbytes=nbytes,
    )  # fmt: skip


def rank_of(rank, number, points=40):
    memory = memory_of(number)
    at = max(memory, key=lambda row: row.peak)
    margin = [
        MarginRow(name="CUDA context", nbytes=600 * MIB, scaling="a process", source="pytorch/pytorch#109888"),
        MarginRow(
            name="NCCL: collectives", nbytes=5 * 576 * MIB, scaling="5 groups x 24 channels x 2 algorithms x 12 MiB",
            source=SOURCE,
        ),
        MarginRow(
            name="fragmentation", nbytes=2 * GIB, scaling="10% of the 20.0 GiB that come and go", source="assumed"
        ),
    ]  # fmt: skip
    curve, borders = curve_of(number, points)
    return RankResult(
        rank=rank,
        stages=dict.fromkeys(STAGES, number % 4),
        stands_for=16,
        why=f"the data-parallel rank with the {'least' if number > 3 else 'most'} work",
        memory=memory,
        peak=at.peak,
        peak_at=(at.step, at.phase),
        margin=margin,
        need=at.peak + sum(row.nbytes for row in margin),
        curve=curve,
        phases_at=borders,
        messages=messages_of(rank),
        groups_created=212,
        memberships=23,
        host_peak=3 * GIB,
        resume_point=ResumePointRow(nbytes=14 * GIB, files=2, tables=123_400_000, peak=30 * GIB, host_bytes=14 * GIB),
        offloaded=30 * GIB,
        cache_bytes=int(22.5 * GIB),
    )


def step_time(step):
    phases = []
    for phase in STEP:
        seconds = SECONDS.get(phase, 1.5)
        train = phase.startswith("train")
        phases.append(
            PhaseTime(
                phase=phase, seconds=seconds, busy=seconds * 0.7, idle=seconds * 0.2, communication=seconds * 0.1,
                again=seconds * 0.15, offload=0.0, flops=3.1e16 if train else 0.0, utilisation=0.413 if train else None,
            )
        )  # fmt: skip
    return StepTime(
        step=step, seconds=sum(each.seconds for each in phases), phases=phases, utilisation=0.372, bubble=0.187,
        recomputation=0.15, exposed=0.1, forward_and_backward=0.55, communication=31.5, tokens_per_second=8123.0,
    )  # fmt: skip


def a_result(points=40):
    """Ranks 0, 8, ..., 56; the first is the tightest."""
    ranks = [rank_of(8 * number, number, points) for number in range(8)]
    tightest = max(ranks, key=lambda rank: rank.need)
    words = "tp 8 x pp 4 x dp 2, sequence parallelism"
    return Result(
        command="rl",
        world_size=64,
        ranks_per_node=8,
        steps=2,
        layouts=dict.fromkeys(STAGES, words),
        capacity=int(79.16 * GIB),
        fits=True,
        tightest=tightest.rank,
        refusals=[],
        ranks=ranks,
        host=[
            HostRow(name="tensors of the program", nbytes=3 * GIB, source="counted"),
            HostRow(name="Python and libraries", nbytes=2 * GIB, source="assumed"),
        ],
        host_per_node=40 * GIB,
        times=[step_time(1), step_time(2)],
        rollouts=[
            RolloutRow(slowest=210.0, fastest=171.5, tokens=1_741_824, most_running=128),
            RolloutRow(
                slowest=204.0, fastest=166.0, tokens=1_702_111, most_running=128, computed=2_345_678, waited=12.5
            ),
        ],
        reshard=Reshard(
            received_min=15_100_000_000, received_mean=15_900_000_000.0, received_max=16_700_000_000,
            sent_max=17_300_000_000, between_nodes=705_000_000_000,
        ),
        faults=[],
        assumptions=[
            AssumptionRow(
                where="megarlhf/parallel/step.py:301 in gradient_norm",
                what="aten._local_scalar_dense of float32",
                answer="1.0",
                reason="every gradient is taken to be finite: no update is skipped",
                count=16,
            )
        ],
        notes=[
            "The tokenizer is stood in for: none stands at models/llama-3-70b.",
            "TransformerEngine's layers are counted by a table.",
        ],
        hardware="machine of the test",
        hardware_sources={"memory_bandwidth": "a datasheet", "launch": "assumed"},
        config={"run": {"dir": "runs/ppo-64", "world_size": 64}, "train": {"num_steps": 1000}},
        tool_seconds=312.4,
        tool_gib=1.71,
    )  # fmt: skip


def too_small(result, gib):
    """The same job on a device of so many GiB."""
    capacity = int(gib * GIB)
    return replace(result, capacity=capacity, fits=all(rank.need <= capacity for rank in result.ranks))
