"""Where sequences stand in a packed row of which some begin alike: what they share stands once.

Level after level, as `PackedRow` wants it: first what begins a sequence, then what continues it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.parallel.packing.rows import ROOT


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences of a micro-batch that begin with the same tokens, or one that is alone."""

    sequences: tuple[int, ...]
    """By the caller's numbers."""
    lengths: tuple[int, ...]
    """Tokens of each, the shared ones included."""
    shared: int
    """Tokens of the common beginning; 0: they are apart all the same."""

    @property
    def is_tree(self) -> bool:
        """What they share is computed once."""
        return self.shared > 0 and len(self.sequences) > 1


@dataclass(frozen=True)
class RowSegments:
    """The segments of a row, and which of them each sequence ends with."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each sequence's last segment begins."""
        begins = tuple(itertools.accumulate(self.lengths, initial=0))
        return tuple(begins[segment] for segment in self.last)


def segments_of(entries: Sequence[SequenceGroup]) -> RowSegments:
    """Of the sequences of all entries, in their order. One that is no longer than what it shares ends with it."""
    lengths: list[int] = []
    parents: list[int] = []
    last: dict[tuple[int, int], int] = {}
    roots: list[int] = []
    for at, entry in enumerate(entries):
        roots.append(len(lengths))
        if entry.is_tree:
            lengths.append(entry.shared)
        else:
            last |= {(at, member): len(lengths) + member for member in range(len(entry.lengths))}
            lengths += entry.lengths
    parents += [ROOT] * len(lengths)
    for at, entry in enumerate(entries):
        for member, length in enumerate(entry.lengths if entry.is_tree else ()):
            last[at, member] = roots[at] if length == entry.shared else len(lengths)
            if length > entry.shared:
                lengths.append(length - entry.shared)
                parents.append(roots[at])
    in_order = itertools.chain.from_iterable(
        ((at, member) for member in range(len(entry.sequences))) for at, entry in enumerate(entries)
    )
    return RowSegments(tuple(lengths), tuple(parents), tuple(last[key] for key in in_order))
