"""The rounds of one rank: which messages it sends and receives in each, and which of them need a bucket.

In a round a pair of ranks exchanges one message, gathered into a bucket and scattered from another; but a large
stretch that is one run at an end is a message of its own, so that there it needs no bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megarlhf.weights.plan.copy_plan import CopyPlan
from megarlhf.weights.transport.moves import End, Move, MoveStream, Part, moves_of
from megarlhf.weights.transport.schedule import Span, rank_rounds
from megarlhf.weights.transport.storages import Storages


@dataclass(frozen=True, slots=True)
class Message:
    """Parts of one peer's stream, seen from one end."""

    peer: int
    parts: Sequence[Part]
    ends: Sequence[End]
    stretch: slice | None
    """Of the bucket; None: all lies in one run, and travels from or to where it lies."""

    def views(self, storages: Storages) -> list[torch.Tensor]:
        """Its elements in live memory, in order; one flat view if there is no stretch."""
        return [view for part, end in zip(self.parts, self.ends, strict=True) for view in part.views(end, storages)]


@dataclass(frozen=True, slots=True)
class Round:
    """Both ends of a pair post the messages between them in the same order."""

    sends: list[Message]
    receives: list[Message]


class RankTraffic:
    """What one rank sends and receives by a plan."""

    def __init__(self, plan: CopyPlan, rank: int, least: int) -> None:
        """`least`: elements that make a message of their own worth while; the same on all ranks."""
        self._traffic, self._rank, self._least = plan.traffic, rank, least
        self._local = moves_of(plan.local(rank))
        self._outgoing = {peer: MoveStream(copies) for peer, copies in plan.sends(rank).items()}
        self._incoming = {peer: MoveStream(copies) for peer, copies in plan.receives(rank).items()}

    def missing(self, src: Storages, dst: Storages) -> list[str]:
        """Storages that the plan uses and the rank does not have, in words."""
        sources = {move.src.storage for stream in self._outgoing.values() for move in stream.moves}
        destinations = {move.dst.storage for stream in self._incoming.values() for move in stream.moves}
        sources.update(move.src.storage for move in self._local)
        destinations.update(move.dst.storage for move in self._local)
        return [f"source {name}" for name in sorted(sources - src.keys())] + [
            f"destination {name}" for name in sorted(destinations - dst.keys())
        ]

    def local(self, src: Storages, dst: Storages) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(into, from) of what the rank copies from itself."""
        return [(move.view(move.dst, dst), move.view(move.src, src)) for move in self._local]

    def rounds(self, capacity: int, src: Storages, dst: Storages, dtype: torch.dtype) -> list[Round]:
        """In each the rank sends at most `capacity` elements and receives as many.

        What is not of `dtype` goes through a bucket.
        """
        return [
            Round(
                self._messages(self._outgoing, one.sends, lambda move: move.src, src, dtype),
                self._messages(self._incoming, one.receives, lambda move: move.dst, dst, dtype),
            )
            for one in rank_rounds(self._traffic, self._rank, capacity)
        ]

    def _messages(
        self,
        streams: Mapping[int, MoveStream],
        spans: Mapping[int, Sequence[Span]],
        end_of: Callable[[Move], End],
        storages: Storages,
        dtype: torch.dtype,
    ) -> list[Message]:
        found, at = [], 0
        for peer in spans:
            for parts in _framed(streams[peer].parts(spans[peer]), self._least):
                ends = [end_of(part.move) for part in parts]
                numel = sum(part.numel for part in parts)
                lies_ready = parts[0].move.in_one_run(ends[0]) and storages[ends[0].storage].dtype == dtype
                if len(parts) == 1 and lies_ready:
                    found.append(Message(peer, parts, ends, None))
                else:
                    found.append(Message(peer, parts, ends, slice(at, at + numel)))
                    at += numel
        return found


def bucket_size(messages: Iterable[Message]) -> int:
    """Elements of a bucket that the messages of a round need."""
    return max((message.stretch.stop for message in messages if message.stretch is not None), default=0)


def _framed(parts: Iterable[Part], least: int) -> Iterator[list[Part]]:
    """The messages that carry these parts: all that is small or strided at both ends, then each of the rest alone."""
    together: list[Part] = []
    alone: list[Part] = []
    for part in parts:
        move = part.move
        in_one_run = move.in_one_run(move.src) or move.in_one_run(move.dst)
        (alone if in_one_run and part.numel >= least else together).append(part)
    if together:
        yield together
    yield from ([part] for part in alone)
