"""Segments of a packed row with shared prefixes: each prefix is in the row once.

The order is that of `PackedRow`: first all roots, then everything that continues them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.parallel.packing.rows import ROOT


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences of a micro-batch with a common prefix, or a single sequence."""

    sequences: tuple[int, ...]
    """Indices of the caller."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, including the prefix."""
    shared: int
    """Tokens of the common prefix; 0: nothing is shared."""

    @property
    def is_tree(self) -> bool:
        """True if the prefix is computed once for several sequences."""
        return self.shared > 0 and len(self.sequences) > 1


@dataclass(frozen=True)
class RowSegments:
    """The segments of a row."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    last: tuple[int, ...]
    """For each sequence the segment that it ends with."""

    @property
    def starts(self) -> tuple[int, ...]:
        """First token of each sequence's last segment."""
        starts = tuple(itertools.accumulate(self.lengths, initial=0))
        return tuple(starts[segment] for segment in self.last)


def segments_of(entries: Sequence[SequenceGroup]) -> RowSegments:
    """Segments for the sequences of all entries, in their order. A sequence that is just the prefix ends with it.

    Example: entries of lengths (5, 4, 6) with a prefix of 4, and of length (3,) -> lengths (4, 3, 1, 2), parents
    (ROOT, ROOT, 0, 0), last (2, 0, 3, 1)
    """
    lengths: list[int] = []
    roots: list[int] = []
    """First root of each entry."""
    for entry in entries:
        roots.append(len(lengths))
        lengths += [entry.shared] if entry.is_tree else entry.lengths
    parents = [ROOT] * len(lengths)
    last: list[int] = []
    for entry, root in zip(entries, roots, strict=True):
        for member, length in enumerate(entry.lengths):
            if not entry.is_tree:
                last.append(root + member)
            elif length == entry.shared:
                last.append(root)
            else:
                last.append(len(lengths))
                lengths.append(length - entry.shared)
                parents.append(root)
    return RowSegments(tuple(lengths), tuple(parents), tuple(last))
