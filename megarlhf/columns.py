"""Ragged columns, their placement on ranks, and their movement between ranks.

Legend: N samples of the step, T tokens of the samples end to end, W ranks of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.collective_errors import raise_on_all_ranks


@dataclass(frozen=True)
class Ragged:
    """Rows of different length, end to end."""

    values_T: Tensor
    lengths_N: Tensor
    """int64, on the CPU."""

    @staticmethod
    def from_rows(rows: Sequence[Tensor], dtype: torch.dtype) -> Ragged:
        values = torch.cat([row.to(dtype) for row in rows]) if rows else torch.empty(0, dtype=dtype)
        return Ragged(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))

    @staticmethod
    def joined(parts: Sequence[tuple[Ragged, Sequence[int]]]) -> Ragged:
        """Chosen rows of each part, one part after the other."""
        rows = [rows[n] for column, chosen in parts for rows in (column.rows(),) for n in chosen]
        return Ragged(torch.cat(rows), torch.cat([column.lengths_N[list(chosen)] for column, chosen in parts]))

    def extended(self, rows: Sequence[int], more: Ragged) -> Ragged:
        """The rows, of which those in `rows` go on with the rows of `more`."""
        extended = self.rows()
        for n, row in zip(rows, more.rows(), strict=True):
            extended[n] = torch.cat([extended[n], row])
        return Ragged.from_rows(extended, self.values_T.dtype)

    def only(self, kept_N: Tensor) -> Ragged:
        """Keep the marked rows, [N] bool on the CPU; the others become empty."""
        kept_T = kept_N.repeat_interleave(self.lengths_N).nonzero().flatten()
        return Ragged(self.values_T[kept_T.to(self.values_T.device)], self.lengths_N * kept_N)

    @property
    def num_tokens(self) -> int:
        return self.values_T.numel()

    def rows(self) -> list[Tensor]:
        """Views of the rows."""
        return list(self.values_T.split(self.lengths_N.tolist()))

    @property
    def cu_seqlens(self) -> Tensor:
        """[N + 1] int64, on the CPU: row n is values_T[cu_seqlens[n] : cu_seqlens[n + 1]]."""
        return torch.cat([self.lengths_N.new_zeros(1), self.lengths_N.cumsum(0)])

    @property
    def sums_N(self) -> Tensor:
        """Sum of each row of integers, on the CPU."""
        rows_T = torch.arange(len(self.lengths_N)).repeat_interleave(self.lengths_N)
        return torch.zeros_like(self.lengths_N).index_add_(0, rows_T, self.values_T)

    def repeat_per_token(self, values_N: Tensor) -> Ragged:
        """Rows of the same lengths that repeat one number per row."""
        lengths_N = self.lengths_N.to(values_N.device)
        return Ragged(values_N.repeat_interleave(lengths_N, output_size=self.num_tokens), self.lengths_N)


class Traffic:
    """Counter of the bytes of columns that each rank has received. Each `redistribute` to readers adds to it."""

    def __init__(self, num_ranks: int) -> None:
        self.received_W = torch.zeros(num_ranks, dtype=torch.int64)
        """Bytes by rank, on the CPU."""


@dataclass(frozen=True, eq=False)
class ColumnSharding:
    """Placement of the token columns on the ranks, by sample. The same on every rank."""

    resident_WN: Tensor
    """bool, on the CPU: the rank has the sample's columns. At least one rank has each sample."""
    traffic: Traffic
    """Bytes of the columns that were moved to this placement so far. The only part that changes."""

    def __post_init__(self) -> None:
        assert bool(self.resident_WN.any(0).all()), "a sample's columns are on no rank"

    def incoming_bytes(self, lengths_N: Tensor, owners: Sequence[Sequence[int]], element_bytes: int) -> Tensor:
        """Bytes of a column that each rank receives from its owners, [W] int64 on the CPU."""
        owned_WN = torch.zeros_like(self.resident_WN)
        for owned_N, samples in zip(owned_WN, owners, strict=True):
            owned_N[list(samples)] = True
        return (self.resident_WN & ~owned_WN).long() @ lengths_N * element_bytes

    @cached_property
    def local_N(self) -> Tensor:
        """bool, on the CPU: this rank has the sample's columns."""
        return self.resident_WN[dist.get_rank()]

    @cached_property
    def senders_N(self) -> Tensor:
        """First rank that has each sample's columns, on the CPU. It sends values computed from them."""
        return self.resident_WN.int().argmax(0)

    @cached_property
    def is_sender_N(self) -> Tensor:
        """bool, on the CPU: this rank is the sample's sender."""
        return self.senders_N == dist.get_rank()


def redistribute(
    mine: Mapping[int, Tensor],
    lengths_N: Tensor,
    like: Tensor,
    owners: Sequence[Sequence[int]],
    to: ColumnSharding | None = None,
) -> Ragged:
    """Move rows from the ranks that own them to the ranks that read them, `to` (None: every rank reads all).

    `owners[r]` are the samples whose rows rank r provides, by global sample index; together they are all N rows, once
    each. Owners, readers and `lengths_N` are known everywhere, so only values are sent. A rank receives the rows that
    it reads and does not own, which are counted in `to.traffic`; if all ranks read all rows, at most one and a half
    times the column (`replicate`).

    Raises: ValueError, on every rank, if `owners` are not all rows once each, or if a rank does not provide exactly the
    rows that it owns, with the lengths of the index.
    """
    assert len(owners) == dist.get_world_size(), f"owners of {len(owners)} ranks, the run has {dist.get_world_size()}"
    _check_owners(owners, len(lengths_N))
    own = list(owners[dist.get_rank()])
    # A rank that raised alone would leave the others waiting.
    with raise_on_all_ranks(lambda reasons: ValueError("; ".join(reasons))) as problems:
        problems += _wrong_rows(mine, own, lengths_N)
    rows = {n: mine[n].to(like) for n in own}
    if to is None:
        counts = [int(lengths_N[list(samples)].sum()) for samples in owners]
        values = replicate(_joined([rows[n] for n in own], like), counts)
        order = [n for samples in owners for n in samples]
        rows = dict(zip(order, values.split(lengths_N[order].tolist()), strict=True))
        return Ragged(_joined([rows[n] for n in range(len(lengths_N))], like), lengths_N)
    rows |= _exchange(rows, lengths_N, like, owners, to)
    to.traffic.received_W += to.incoming_bytes(lengths_N, owners, like.element_size())
    local = to.local_N.nonzero().flatten().tolist()
    return Ragged(_joined([rows[n] for n in local], like), lengths_N * to.local_N)


def _joined(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(rows)) if rows else like.new_empty(0)


def _exchange(
    rows: Mapping[int, Tensor], lengths_N: Tensor, like: Tensor, owners: Sequence[Sequence[int]], to: ColumnSharding
) -> dict[int, Tensor]:
    """Receive the rows that this rank reads and does not own. Each row travels once to each of its readers."""
    rank, own = dist.get_rank(), list(owners[dist.get_rank()])
    outgoing = [[own[k] for k in reads.nonzero().flatten().tolist()] for reads in to.resident_WN[:, own]]
    incoming = [[n for n in samples if to.local_N[n]] for samples in owners]
    outgoing[rank] = incoming[rank] = []
    sent = _joined([rows[n] for samples in outgoing for n in samples], like)
    sizes_out, sizes_in = ([int(lengths_N[samples].sum()) for samples in by_rank] for by_rank in (outgoing, incoming))
    received = like.new_empty(sum(sizes_in))
    dist.all_to_all_single(received, sent, sizes_in, sizes_out)
    if not (order := [n for samples in incoming for n in samples]):  # a fake tensor is split into at least one part
        return {}
    return dict(zip(order, received.split(lengths_N[order].tolist()), strict=True))


def replicate(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Values of all ranks end to end, on every rank; `counts` are the numbers of values by rank.

    Few ranks own outputs, so a padded all-gather would send mostly padding. Instead every rank is sent an equal slice
    of the whole, and the slices are gathered. A rank receives little more than the whole.
    """
    world = len(counts)
    if world == 1:
        return values
    total, rank = sum(counts), dist.get_rank()
    size = -(-total // world)
    starts = [sum(counts[:r]) for r in range(world)]

    def shared(owner: int, slice_of: int) -> int:
        """Number of an owner's elements in the slice of a rank."""
        stop = min(starts[owner] + counts[owner], (slice_of + 1) * size)
        return max(0, stop - max(starts[owner], slice_of * size))

    part = values.new_zeros(size)
    sizes_in = [shared(owner, rank) for owner in range(world)]
    sizes_out = [shared(rank, other) for other in range(world)]
    dist.all_to_all_single(part[: sum(sizes_in)], values, sizes_in, sizes_out)
    whole = values.new_empty(world * size)
    dist.all_gather_into_tensor(whole, part)
    return whole[:total]


def _check_owners(owners: Sequence[Sequence[int]], num_samples: int) -> None:
    count = Counter(n for samples in owners for n in samples)
    expected = range(num_samples)
    faults = {
        "missing": [n for n in expected if n not in count],
        "owned twice": sorted(n for n in count if count[n] > 1),
        "unknown": sorted(n for n in count if n not in expected),
    }
    faulty_rows = "; ".join(f"{what}: {rows[:5]}" for what, rows in faults.items() if rows)
    if faulty_rows:
        raise ValueError(f"{count.total()} rows for {len(expected)} samples, expected each once; {faulty_rows}")


def _wrong_rows(mine: Mapping[int, Tensor], own: Sequence[int], lengths_N: Tensor) -> list[str]:
    """Describe differences between the rows that this rank provides and those that it owns."""
    if sorted(mine) != sorted(own):
        missing, extra = sorted(set(own) - set(mine))[:5], sorted(set(mine) - set(own))[:5]
        return [f"{len(mine)} rows are given, expected {len(own)}; missing: {missing}, beside them: {extra}"]
    return [
        f"row {n} has {row.numel()} values, the index says {int(lengths_N[n])}"
        for n, row in mine.items()
        if row.numel() != int(lengths_N[n])
    ]
