"""Numbers and sentences about a result, for the console and the page. Memory is in GiB, 2^30 bytes."""

from __future__ import annotations

from collections.abc import Mapping

from megarlhf.observe.terminal.progress import format_number
from megarlhf.rehearsal.result import RankResult, Result

GIB = 2**30
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
NOT_MEASURED = "Nothing here was measured on a GPU."
ESTIMATE = "All times are estimates."
NO_TIME = "No pipeline was rehearsed whole, so no step was replayed and there is no time to tell."


def gib(nbytes: float) -> str:
    """Two decimals. A little memory is shown as `<0.01`, not as none."""
    if 0 < nbytes < 0.005 * GIB:
        return "<0.01"
    return f"{nbytes / GIB:.2f}"


def size(nbytes: float) -> str:
    """Four digits and a unit of powers of 1000."""
    power = 0
    while nbytes >= 1000 ** (power + 1) and power < len(UNITS) - 1:
        power += 1
    return f"{nbytes / 1000**power:.4g} {UNITS[power]}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def quantity(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def moment(step: int, phase: str) -> str:
    return f"{phase} in step {step}" if step else f"{phase} before the first step"


def stages(rank: RankResult) -> str:
    """Pipeline stages of a rank: `stage 0 of all roles`, or `stage 0 of actor, critic; stage 1 of reference`."""
    by_stage: dict[int | None, list[str]] = {}
    if len(rank.stages) > 1 and len(set(rank.stages.values())) == 1:
        return f"stage {next(iter(rank.stages.values()))} of all roles"
    for role, stage in rank.stages.items():
        by_stage.setdefault(stage, []).append(role)
    return "; ".join(
        f"{'nothing' if stage is None else f'stage {stage}'} of {', '.join(roles)}" for stage, roles in by_stage.items()
    )


def rank_name(result: Result, rank: RankResult) -> str:
    """A rank in the page's list: `0: stage 0 of all roles, needs 74.36 GiB, 4.80 GiB free`."""
    name = f"{rank.rank}: {stages(rank)}, needs {gib(rank.need)} GiB"
    if not result.capacity:
        return name
    left = result.capacity - rank.need
    return f"{name}, {gib(left)} GiB free" if left >= 0 else f"{name}, {gib(-left)} GiB too much"


def kinds(by_kind: Mapping[str, int], most: int | None = None) -> str:
    """`activations 21.40, parameters 8.55, 3 others 0.11`, in GiB, the largest first."""
    ordered = sorted(by_kind.items(), key=lambda item: -item[1])
    shown = ordered if most is None else ordered[:most]
    parts = [f"{kind} {gib(nbytes)}" for kind, nbytes in shown]
    if others := ordered[len(shown) :]:
        parts.append(f"{quantity(len(others), 'other')} {gib(sum(nbytes for _, nbytes in others))}")
    return ", ".join(parts)


def verdict(result: Result) -> list[str]:
    """Whether the job starts, whether its ranks fit together, whether it fits: one sentence each, the gravest first."""
    sentences = []
    if result.refusals:
        sentences.append(f"The run would not start: {quantity(len(result.refusals), 'reason')}, named below.")
    if result.faults:
        sentences.append(f"Its ranks do not fit together: {quantity(len(result.faults), 'fault')}, named below.")
    rank, rehearsed = result.tightest_rank, quantity(len(result.ranks), "rehearsed rank")
    if not result.capacity:
        sentences.append("No size of a device was given, so nothing says whether it fits.")
    elif over := [rank for rank in result.ranks if rank.need > result.capacity]:
        missing = f"It does not fit: {gib(-result.free)} GiB are missing with the margin"
        sentences.append(f"{missing}, and {len(over)} of {rehearsed} cannot hold theirs.")
    else:
        fits = "It fits" if result.fits else "Its memory fits"
        sentences.append(f"{fits}, with {gib(result.free)} GiB to spare beyond the margin.")
    capacity = f" of {gib(result.capacity)}" if result.capacity else ""
    sentences.append(
        f"Rank {rank.rank} ({stages(rank)}) is the tightest of {rehearsed}. It needs {gib(rank.need)}{capacity} GiB: "
        f"{gib(rank.peak)} GiB of tensors in {moment(*rank.peak_at)}, and a margin of {gib(rank.need - rank.peak)} GiB."
    )
    return sentences


def waits_for_cache(result: Result) -> list[str]:
    """Sentence about responses that wait for room in the last step, if any do."""
    if not result.rollouts or not result.rollouts[-1].waited:
        return []
    last = result.rollouts[-1]
    share = f"{format_number(last.waited)} of {format_number(last.slowest)} s"
    hint = "more memory for engines, another rollout.parallel.tp or fewer rollout.slices may help"
    return [f"Responses wait for room in an engine's cache during {share}: {hint}."]


def resume_point(result: Result) -> list[str]:
    """Bytes of a resume point and memory while it is written; nothing where none was written."""
    rows = [(rank, rank.resume_point) for rank in result.ranks if rank.resume_point is not None]
    if not rows:
        return []
    writer, most = max(rows, key=lambda row: row[1].nbytes)
    holder, highest = max(rows, key=lambda row: row[1].peak)
    copy = f", from a copy of {gib(most.host_bytes)} GiB in host memory" if most.host_bytes else ""
    files = quantity(most.files, "file")
    tables = f" Rank 0 also writes {size(most.tables)} of responses that are under way." if most.tables else ""
    return [
        f"A resume point: rank {writer.rank} writes most, {gib(most.nbytes)} GiB in {files}{copy}.{tables}",
        f"When it begins, the device of rank {holder.rank} holds {gib(highest.peak)} GiB.",
    ]
