"""What a rehearsal says in sentences, on the console and on the page. Memory is in GiB, 2^30 bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarlhf.rehearsal.result import PhaseRow, RankResult, Result

GIB = 2**30
NOT_MEASURED = "Nothing here was measured on a GPU."
ESTIMATE = "All times are estimates."
NO_TIME = "No pipeline was rehearsed whole, so no step was replayed and there is no time to tell."


def gib(nbytes: float) -> str:
    """Two decimals; what they do not show is not shown as nothing."""
    if 0 < nbytes < 0.005 * GIB:
        return "<0.01"
    return f"{nbytes / GIB:.2f}"


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def when(step: int, phase: str) -> str:
    return f"{phase} in step {step}" if step else f"{phase} before the first step"


def free(result: Result, rank: RankResult) -> str:
    """`4.80 GiB free`, `1.20 GiB too much`; nothing where no size of a device was given."""
    if not result.capacity:
        return ""
    left = result.capacity - rank.need
    return f"{gib(left)} GiB free" if left >= 0 else f"{gib(-left)} GiB too much"


def stages(rank: RankResult) -> str:
    """Of all roles; those with the same stage together."""
    by_stage: dict[int | None, list[str]] = {}
    if len(rank.stages) > 1 and len(set(rank.stages.values())) == 1:
        return f"stage {next(iter(rank.stages.values()))} of all roles"
    for role, stage in rank.stages.items():
        by_stage.setdefault(stage, []).append(role)
    return "; ".join(
        f"{'nothing' if stage is None else f'stage {stage}'} of {', '.join(roles)}" for stage, roles in by_stage.items()
    )


def by_need(result: Result) -> list[RankResult]:
    """The tightest first."""
    return sorted(result.ranks, key=lambda rank: (rank.rank != result.tightest, -rank.need, rank.rank))


def at_peak(rank: RankResult) -> PhaseRow:
    """The row of the rank's peak."""
    return next(row for row in rank.memory if (row.step, row.phase) == rank.peak_at)


def shown_steps(numbers: Sequence[int]) -> list[int]:
    """The first step and the last one, which stands for all later ones; 0, before the first step, is none."""
    steps = sorted(set(numbers) - {0})
    return [steps[0], steps[-1]] if len(steps) > 1 else steps


def consists(by_kind: Mapping[str, int], most: int | None = None) -> str:
    """`activations 21.40, parameters 8.55, 3 others 0.11`, in GiB, the largest first."""
    kinds = sorted(by_kind.items(), key=lambda item: -item[1])
    kept = kinds if most is None else kinds[:most]
    parts = [f"{kind} {gib(nbytes)}" for kind, nbytes in kept]
    if rest := kinds[len(kept) :]:
        parts.append(f"{counted(len(rest), 'other')} {gib(sum(nbytes for _, nbytes in rest))}")
    return ", ".join(parts)


def verdict(result: Result) -> list[str]:
    """Does it start, do its ranks fit together, does it fit: a sentence each, the gravest first."""
    sentences = []
    if result.refusals:
        sentences.append(f"The run would not start: {counted(len(result.refusals), 'reason')}, named below.")
    if result.faults:
        sentences.append(f"Its ranks do not fit together: {counted(len(result.faults), 'fault')}, named below.")
    rank = result.tightest_rank
    of = f" of {gib(result.capacity)}" if result.capacity else ""
    needs = (
        f"Rank {rank.rank} ({stages(rank)}) is the tightest of {counted(len(result.ranks), 'rehearsed rank')}. It "
        f"needs {gib(rank.need)}{of} GiB: {gib(rank.peak)} GiB of tensors in {when(*rank.peak_at)}, and a margin of "
        f"{gib(rank.need - rank.peak)} GiB."
    )
    return [*sentences, _memory(result), needs]


def _memory(result: Result) -> str:
    if not result.capacity:
        return "No size of a device was given, so nothing says whether it fits."
    over = [each for each in result.ranks if each.need > result.capacity]
    if over:
        number = f"{len(over)} of {counted(len(result.ranks), 'rehearsed rank')}"
        return f"It does not fit: {gib(-result.free)} GiB are missing with the margin, and {number} cannot hold theirs."
    fits = "It fits" if result.fits else "Its memory fits"
    return f"{fits}, with {gib(result.free)} GiB to spare beyond the margin."


def how_counted() -> str:
    """What is known how."""
    return (
        f"{NOT_MEASURED} The program itself ran, rank by rank, with tensors that hold no numbers. Every tensor that it "
        "made is counted from its shape. Layers of TransformerEngine, where the notes say that they stand in, are "
        "counted from the table of what they keep (docs/rehearsal-gpu.md). What is no tensor (the driver's context, "
        "NCCL's buffers, work space of libraries, fragmentation) is the margin: formulas with stated numbers, some of "
        "them assumed. " + ESTIMATE
    )


def of_resume_point(result: Result) -> list[str]:
    """What is written of one, in sentences."""
    rows = [(rank, rank.resume_point) for rank in result.ranks if rank.resume_point is not None]
    if not rows:
        return []
    rank, most = max(rows, key=lambda row: row[1].nbytes)
    at, highest = max(rows, key=lambda row: row[1].peak)
    copy = f", from a copy of {gib(most.host_bytes)} GiB in host memory" if most.host_bytes else ""
    return [
        f"A resume point: rank {rank.rank} writes most, {gib(most.nbytes)} GiB in {counted(most.files, 'file')}{copy}.",
        f"When it begins, the device of rank {at.rank} holds {gib(highest.peak)} GiB.",
    ]
