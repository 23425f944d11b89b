"""Times of steps and phases, from the traces of whole pipelines replayed together. All are estimates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from megarlhf.rehearsal.cost_model.pricing import Pricing
from megarlhf.rehearsal.job import RankRecord
from megarlhf.rehearsal.result import PhaseTime, StepTime
from megarlhf.rehearsal.timeline.simulate import replay
from megarlhf.rehearsal.timeline.simulated import PhaseTimes, StepTimes
from megarlhf.rehearsal.timeline.trace import Work

MULTIPLIES: tuple[Work, ...] = ("matmul", "attention")


def times_of(
    records: Mapping[int, RankRecord],
    whole: Sequence[int],
    price: Pricing,
    groups: Mapping[tuple[int, ...], str],
    world_size: int,
    tokens: Mapping[int, int],
    dtype: str,
) -> tuple[list[StepTime], list[str]]:
    """(times of each step, sentences about ranks that do not fit together).

    whole: ranks of complete pipelines, whose times are reported. Faults are searched among all ranks.
    groups: names of groups by their ranks.
    tokens: trained tokens of the whole job, by step.
    dtype: dtype of whose peak the utilisation is a share.
    """

    def label(ranks: tuple[int, ...]) -> str:
        return groups.get(ranks) or ("world" if len(ranks) == world_size else f"{len(ranks)} ranks")

    replayed = replay({rank: records[rank].events for rank in whole}, price, label=label)
    peak = price.peak(dtype)
    complete = [records[rank] for rank in whole]
    steps = [_step(step, complete, peak, tokens.get(step.step, 0)) for step in replayed.steps if step.step]
    if len(whole) < len(records):
        everyone = {rank: record.events for rank, record in records.items()}
        replayed = replay(everyone, price, label=label)
    return steps, [fault.sentence for fault in replayed.faults]


def _step(times: StepTimes, records: Sequence[RankRecord], peak: float, tokens: int) -> StepTime:
    assert times.step is not None
    phases = [_phase(times.step, name, phase, records, peak) for name, phase in times.phases.items()]
    seconds = times.seconds()
    at_work = seconds - sum(phase.seconds for phase in phases if phase.phase == "rollout")
    training = [phase for phase in phases if phase.phase.startswith("train/")]
    trained = sum(phase.seconds for phase in training)

    def share(seconds: float) -> float:
        return seconds / trained if trained else 0.0

    return StepTime(
        step=times.step,
        seconds=seconds,
        phases=phases,
        utilisation=sum(phase.flops for phase in phases) / (at_work * peak) if at_work else 0.0,
        bubble=share(sum(phase.idle for phase in training)),
        recomputation=share(sum(phase.again for phase in training)),
        exposed=share(sum(phase.communication for phase in training)),
        forward_and_backward=share(sum(phase.busy - phase.again for phase in training)),
        communication=sum(phase.communication for phase in phases),
        tokens_per_second=tokens / seconds if seconds else 0.0,
    )


def _phase(step: int, name: str, times: PhaseTimes, records: Sequence[RankRecord], peak: float) -> PhaseTime:
    ranks, seconds = list(times.ranks.values()), times.seconds()
    flops = fmean(sum(record.flops.get((step, name, work), 0) for work in MULTIPLIES) for record in records)
    return PhaseTime(
        phase=name,
        seconds=seconds,
        busy=fmean(rank.busy() for rank in ranks),
        idle=fmean(rank.idle() for rank in ranks),
        communication=fmean(rank.exposed() - rank.idle() for rank in ranks),
        again=fmean(record.recomputed_seconds.get((step, name), 0.0) for record in records),
        offload=fmean(record.work_seconds.get((step, name, "offload"), 0.0) for record in records),
        flops=flops,
        utilisation=flops / (seconds * peak) if flops and seconds else None,
    )
