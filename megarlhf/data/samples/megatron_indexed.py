"""Megatron-LM's indexed data, `PREFIX.bin` and `PREFIX.idx`: documents of token ids, cut into samples of one length.

What `tools/preprocess_data.py` of Megatron-LM writes is read without Megatron. Samples are those of the first epoch of
its GPTDataset with the same split, length and seed: documents in an order drawn by numpy's RandomState(seed), end to
end; a sample is `sequence_length` + 1 tokens, and begins with the last token of the one before, so that each token but
the first is learnt once. What is left at the end is dropped.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from megarlhf.config.data import SourceConfig, parse_blend
from megarlhf.data.blocks import digest_of_blocks
from megarlhf.data.sample_types import SFTSample
from megarlhf.data.samples.columns import Array
from megarlhf.data.samples.dataset import Joined, Samples
from megarlhf.data.sources.megatron_files import files_of, prefix_of

Sample = TypeVar("Sample")
HEADER = b"MMIDIDX\x00\x00"
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip
"""By the code in the index; Megatron writes 4 or 8."""
PARTS = ("train", "validation", "test")
_FIRST = struct.Struct("<9sQBQQ")
"""Header, version, dtype, number of sequences, number of document borders."""


@dataclass(frozen=True)
class Indexed:
    """One data set: where each of its sequences stands in the file of tokens."""

    prefix: Path
    tokens: Array
    """All, in the file's dtype, mapped."""
    lengths: Array
    """[sequences] int32."""
    starts: Array
    """[sequences] int64, in tokens."""
    num_documents: int

    def sequence(self, number: int) -> Array:
        """Its tokens."""
        start = int(self.starts[number])
        return self.tokens[start : start + int(self.lengths[number])]

    @functools.cached_property
    def digest(self) -> str:
        """Of the lengths of all sequences, and of the tokens by `digest_of_blocks`: they are too many to read all
        before a run."""
        digest = hashlib.sha256(f"{self.tokens.dtype}/".encode())
        digest.update(np.ascontiguousarray(self.lengths).tobytes())
        digest.update(digest_of_blocks(files_of(self.prefix)[0]).encode())
        return digest.hexdigest()


def read_index(path: str | Path) -> Indexed:
    """Maps a data set. Raises: ValueError for files that are missing, cut off, or of another kind."""
    tokens_file, index_file = files_of(path)
    size = index_file.stat().st_size
    with index_file.open("rb") as stream:
        first = stream.read(_FIRST.size)
    if len(first) < _FIRST.size or not first.startswith(HEADER):
        raise ValueError(f"{index_file} is no index of Megatron's: it begins with {first[:9]!r}, expected {HEADER!r}")
    _, version, code, num_sequences, num_borders = _FIRST.unpack(first)
    if version != 1 or code not in DTYPES:
        raise ValueError(
            f"{index_file}: version {version} and dtype {code}; expected version 1 and a dtype of whole numbers "
            f"({', '.join(map(str, DTYPES))}); write it again with Megatron-LM's tools/preprocess_data.py"
        )
    expected = _FIRST.size + num_sequences * 12 + num_borders * 8
    if size == expected + num_sequences:
        raise ValueError(f"{index_file} has a mode for each sequence: it is of several kinds of data; give text only")
    if size != expected:
        raise ValueError(f"{index_file} has {size} bytes, expected {expected}: it is cut off; copy it again")
    lengths = np.memmap(index_file, np.int32, "r", _FIRST.size, (num_sequences,)) if num_sequences else _none(np.int32)
    place = _FIRST.size + 4 * num_sequences
    pointers = np.memmap(index_file, np.int64, "r", place, (num_sequences,)) if num_sequences else _none(np.int64)
    dtype = np.dtype(DTYPES[code])
    num_bytes = tokens_file.stat().st_size
    needed = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if num_sequences else 0
    if num_bytes != needed:
        raise ValueError(f"{tokens_file} has {num_bytes} bytes, and its index says {needed}; copy both again")
    tokens = np.memmap(tokens_file, dtype, "r") if num_bytes else _none(dtype.type)
    return Indexed(prefix_of(path), tokens, lengths, pointers // dtype.itemsize, max(0, num_borders - 1))


def _none(dtype: type[np.generic]) -> Array:
    return np.zeros(0, dtype=dtype)


def split_range(split: str | None, part: str, number: int) -> range:
    """Which of `number` sequences belong to a part, by Megatron's `--split`: `969,30,1`; all, where there is none.

    Raises: ValueError for another form, and for a part that would be empty.
    """
    if split is None:
        return range(number)
    try:
        shares = [float(each) for each in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ValueError(f"split = {split!r}, expected shares of training, validation and test, as '969,30,1'")
    total = sum(shares)
    borders = [0.0]
    for share in [*shares, 0.0, 0.0][:3]:
        borders.append(borders[-1] + share / total)
    place = PARTS.index(part)
    chosen = range(round(borders[place] * number), round(borders[place + 1] * number))
    if not chosen:
        raise ValueError(
            f"split = {split!r} leaves the {part} data nothing of {number} documents; change the shares, or give more "
            "data"
        )
    return chosen


class IndexedSamples(Samples[Sample], Generic[Sample]):
    """The samples of a data set, or of a part of it."""

    def __init__(
        self,
        indexed: Indexed,
        chosen: range,
        sequence_length: int,
        seed: int,
        make: Callable[[list[int]], Sample],
        vocab_size: int | None = None,
    ) -> None:
        """Raises: ValueError for fewer tokens than a sample has."""
        order = np.arange(chosen.start, chosen.stop, dtype=np.int32)
        np.random.RandomState(seed).shuffle(order)
        self._indexed, self._order, self._size = indexed, order, sequence_length
        self._ends = np.cumsum(indexed.lengths[order], dtype=np.int64)
        self._make, self._vocab_size = make, vocab_size
        total = int(self._ends[-1]) if len(order) else 0
        self._count = max(0, total - 1) // sequence_length
        self._key = [str(chosen), str(sequence_length), str(seed)]
        if not self._count:
            raise ValueError(
                f"{indexed.prefix} has {total} tokens in {len(order)} documents, fewer than one sample of "
                f"{sequence_length} + 1; give more data or a smaller data.sequence_length"
            )

    def __len__(self) -> int:
        return self._count

    def tokens(self, position: int) -> Array:
        """[sequence_length + 1] of a sample."""
        first, behind = position * self._size, position * self._size + self._size + 1
        document = int(np.searchsorted(self._ends, first, side="right"))
        parts: list[Array] = []
        while first < behind:
            sequence = self._indexed.sequence(int(self._order[document]))
            offset = first - (int(self._ends[document]) - len(sequence))
            parts.append(sequence[offset : offset + behind - first])
            first += len(parts[-1])
            document += 1
        return np.concatenate(parts).astype(np.int64)

    def at(self, position: int) -> Sample:
        """Raises: ValueError for a token that the model does not have."""
        tokens = self.tokens(position)
        if self._vocab_size is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise ValueError(
                f"{self._indexed.prefix}, sample {position}: token {int(tokens.max())} is not below the model's "
                f"vocab_size = {self._vocab_size}; was the data written with another tokenizer?"
            )
        return self._make(tokens.tolist())

    def lengths(self, name: str) -> Array:
        return np.full(self._count, 2 if name == "stretches" else self._size + 1, dtype=np.int64)

    def records(self) -> Array:
        return np.arange(self._count)

    @property
    def num_records(self) -> int:
        """Each sample is one."""
        return self._count

    def prompts(self) -> Array:
        """No two of different data are the same: a sample has no prompt."""
        first = np.frombuffer(self._digest([self._key[0]])[:8], dtype=np.uint64)
        return np.arange(self._count).astype(np.uint64) + first

    def digest(self) -> str:
        """Of what is read of the data (`Indexed.digest`), and how it is cut into samples."""
        return self._digest(self._key).hex()

    def _digest(self, key: list[str]) -> bytes:
        return hashlib.sha256("/".join([self._indexed.digest, *key]).encode()).digest()

    def ends(self, most: int = 100) -> set[int]:
        """The last tokens of the first documents, which should be the tokenizer's end of sequence (`--append-eod`)."""
        sequences = (self._indexed.sequence(int(number)) for number in self._order[:most])
        return {int(sequence[-1]) for sequence in sequences if len(sequence)}


@dataclass(frozen=True)
class IndexedOptions(Generic[Sample]):
    """How a run reads indexed data."""

    sequence_length: int
    """A sample has one token more."""
    seed: int
    make: Callable[[list[int]], Sample]
    """A sample of token ids."""
    vocab_size: int | None = None

    def open(self, source: SourceConfig, part: str) -> IndexedSamples[Sample]:
        """The samples of one set. Raises: ValueError."""
        indexed = read_index(source.path)
        chosen = split_range(source.split, part, len(indexed.lengths))
        return IndexedSamples(indexed, chosen, self.sequence_length, self.seed, self.make, self.vocab_size)


def learnt_whole(tokens: list[int]) -> SFTSample:
    """Every token but the first, which nothing predicts."""
    return SFTSample(tokens, [1, len(tokens)])


def open_indexed(
    blend: str | Path | Sequence[str], split: str | None, sequence_length: int, seed: int, part: str = "train"
) -> Samples[SFTSample]:
    """The samples of a prefix or a blend of several, all tokens learnt; with weights they are drawn from by those.

    Raises: ValueError as `read_index`, `parse_blend`, `split_range` and `IndexedSamples`.
    """
    named = parse_blend(
        blend if isinstance(blend, str) else " ".join(map(str, [blend] if isinstance(blend, Path) else blend))
    )
    parts: list[IndexedSamples[SFTSample]] = []
    for _, prefix in named:
        indexed = read_index(prefix)
        chosen = split_range(split, part, len(indexed.lengths))
        parts.append(IndexedSamples(indexed, chosen, sequence_length, seed, learnt_whole))
    weights = [weight for weight, _ in named if weight is not None]
    if len(parts) == 1:
        return parts[0]
    return Joined(parts, [len(part) for part in parts], weights or None)
