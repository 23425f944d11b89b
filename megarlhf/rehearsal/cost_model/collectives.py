"""Formulas for the time of collectives, from the bandwidth and latency of the links that they cross. Pure functions.

Legend: n ranks on m nodes, r of them on the node that has fewest; S bytes, the whole as in `trace.Collective`; B_in and
a_in are bandwidth (of a rank, in one direction) and latency inside a node, B_out and a_out between nodes.

A ring moves (n-1)/n S over each link for all_gather and reduce_scatter, and twice that for all_reduce (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms", 2009; the factors of nccl-tests, doc/PERFORMANCE.md). Over several
nodes NCCL runs r rings at once, one through each network card, and each carries 1/r of the bytes. Transfers inside a
node and between nodes go on at the same time, so the slower of the two counts:

    all_gather, reduce_scatter   max((n-1)/n S / B_in, (m-1)/m S / (r B_out)) + (n-m) a_in + (m-1) a_out
    all_reduce                   twice that
    broadcast, reduce            max(S / B_in, S / (r B_out)) + (r-1) a_in + ceil(log2 m) a_out
    gather, scatter              (S - S/n) over the links of one rank: max(inside part / B_in, outside part / B_out)
    all_to_all                   as gather, for every rank at once
    barrier                      an all_reduce of nothing

all_reduce may also go through a tree (NCCL, src/graph/tuning.cc: ranks of a node in a chain, nodes in a binary tree),
which takes twice the time of a broadcast. The faster of the two counts, as NCCL chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from megarlhf.rehearsal.timeline.trace import Operation


@dataclass(frozen=True)
class Speed:
    """Speed of a link."""

    bandwidth: float
    """Bytes per second and direction."""
    latency: float
    """Seconds."""


@dataclass(frozen=True)
class Spread:
    """Placement of a group on nodes."""

    ranks: int
    nodes: int
    fewest: int
    """Ranks of the group on the node that has fewest of them."""
    most: int

    @classmethod
    def of(cls, ranks: Sequence[int], ranks_per_node: int) -> Spread:
        """Placement of ranks that are numbered one node after the other."""
        counts = Counter(rank // ranks_per_node for rank in ranks)
        return cls(len(ranks), len(counts), min(counts.values()), max(counts.values()))


def seconds_by_formula(operation: Operation, spread: Spread, nbytes: float, inside: Speed, between: Speed) -> float:
    """Seconds of a collective that has all links to itself; 0 for a group of one rank."""
    if spread.ranks == 1:
        return 0.0
    if operation in ("all_gather", "reduce_scatter"):
        return _ring(spread, nbytes, inside, between)
    if operation in ("all_reduce", "barrier"):
        return 2 * min(_ring(spread, nbytes, inside, between), _chain(spread, nbytes, inside, between))
    if operation in ("broadcast", "reduce"):
        return _chain(spread, nbytes, inside, between)
    return _pairs(spread, nbytes, inside, between)


def message_seconds(nbytes: float, link: Speed) -> float:
    """Latency, plus the bytes at the bandwidth."""
    return link.latency + nbytes / link.bandwidth


def _slower(inside_bytes: float, between_bytes: float, spread: Spread, inside: Speed, between: Speed) -> float:
    """Seconds for the bytes of one rank, inside and between nodes at the same time."""
    of_inside = inside_bytes / inside.bandwidth if spread.most > 1 else 0.0
    of_between = between_bytes / between.bandwidth if spread.nodes > 1 else 0.0
    return max(of_inside, of_between)


def _ring(spread: Spread, nbytes: float, inside: Speed, between: Speed) -> float:
    n, m, r = spread.ranks, spread.nodes, spread.fewest
    moved = _slower(nbytes * (n - 1) / n, nbytes * (m - 1) / m / r, spread, inside, between)
    return moved + (n - m) * inside.latency + (m - 1) * between.latency


def _chain(spread: Spread, nbytes: float, inside: Speed, between: Speed) -> float:
    moved = _slower(nbytes, nbytes / spread.fewest, spread, inside, between)
    return moved + (spread.most - 1) * inside.latency + ceil(log2(spread.nodes)) * between.latency


def _pairs(spread: Spread, nbytes: float, inside: Speed, between: Speed) -> float:
    """One rank and each of the others, at the same time. The rank with fewest neighbours has most to send outside."""
    n = spread.ranks
    moved = _slower(nbytes * (spread.most - 1) / n, nbytes * (n - spread.fewest) / n, spread, inside, between)
    return moved + max(inside.latency if spread.most > 1 else 0.0, between.latency if spread.nodes > 1 else 0.0)
