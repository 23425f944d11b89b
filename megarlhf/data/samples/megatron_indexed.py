"""Megatron-LM's indexed data, `PREFIX.bin` and `PREFIX.idx`: documents of token ids, cut into samples of one length.

Files of Megatron-LM's `tools/preprocess_data.py` are read without Megatron. The samples are those of the first epoch of
its GPTDataset with the same split, length and seed. Documents are put end to end, in an order drawn by numpy's
RandomState(seed). A sample is `sequence_length` + 1 tokens and begins with the last token of the one before, so each
token but the first is learnt once. Tokens left at the end are dropped.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from megarlhf.config import SourceConfig
from megarlhf.data.blocks import digest_of_blocks
from megarlhf.data.sample_types import SFTSample
from megarlhf.data.samples.columns import Array
from megarlhf.data.samples.dataset import Samples
from megarlhf.data.sources.megatron_files import indexed_files, indexed_prefix

Sample = TypeVar("Sample")
HEADER = b"MMIDIDX\x00\x00"
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip
"""Token dtypes by their code in the index. Megatron writes 4 or 8."""
PARTS = ("train", "validation", "test")
_FIRST = struct.Struct("<9sQBQQ")
"""Header, version, dtype, number of sequences, number of document borders."""


@dataclass(frozen=True)
class Indexed:
    """The files of one data set, mapped."""

    prefix: Path
    tokens: Array
    """All tokens, in the file's dtype."""
    lengths: Array
    """[sequences] int32."""
    starts: Array
    """[sequences] int64, positions in `tokens`."""
    num_documents: int

    def sequence(self, index: int) -> Array:
        """Tokens of a sequence."""
        start = int(self.starts[index])
        return self.tokens[start : start + int(self.lengths[index])]

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the lengths of all sequences and of the tokens. Tokens are digested in part (`digest_of_blocks`):
        they are too many to read all before a run."""
        digest = hashlib.sha256(f"{self.tokens.dtype}/".encode())
        digest.update(np.ascontiguousarray(self.lengths).tobytes())
        digest.update(digest_of_blocks(indexed_files(self.prefix)[0]).encode())
        return digest.hexdigest()


def read_index(path: str | Path) -> Indexed:
    """Map a data set. Raises: ValueError for files that are missing, cut off, or of another kind."""
    tokens_file, index_file = indexed_files(path)
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
    offset = _FIRST.size + 4 * num_sequences
    pointers = np.memmap(index_file, np.int64, "r", offset, (num_sequences,)) if num_sequences else _none(np.int64)
    dtype = np.dtype(DTYPES[code])
    num_bytes = tokens_file.stat().st_size
    needed = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if num_sequences else 0
    if num_bytes != needed:
        raise ValueError(f"{tokens_file} has {num_bytes} bytes, and its index says {needed}; copy both again")
    tokens = np.memmap(tokens_file, dtype, "r") if num_bytes else _none(dtype.type)
    return Indexed(indexed_prefix(path), tokens, lengths, pointers // dtype.itemsize, max(0, num_borders - 1))


def _none(dtype: type[np.generic]) -> Array:
    return np.zeros(0, dtype=dtype)


def split_range(split: str | None, part: str, num_documents: int) -> range:
    """Documents of a part (training, validation, test), by Megatron's `--split` such as `969,30,1`. All without a
    split.

    Raises: ValueError for another form, and for a part that would be empty.
    """
    if split is None:
        return range(num_documents)
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ValueError(f"split = {split!r}, expected shares of training, validation and test, as '969,30,1'")
    total = sum(shares)
    borders = [0.0]
    for share in [*shares, 0.0, 0.0][:3]:
        borders.append(borders[-1] + share / total)
    index = PARTS.index(part)
    chosen = range(round(borders[index] * num_documents), round(borders[index + 1] * num_documents))
    if not chosen:
        raise ValueError(
            f"split = {split!r} leaves the {part} data nothing of {num_documents} documents; change the shares, or "
            "give more data"
        )
    return chosen


class IndexedSamples(Samples[Sample], Generic[Sample]):
    """Samples of a data set, or of a part of it."""

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
        """[sequence_length + 1] tokens of a sample."""
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
        """The sample at a position. Raises: ValueError for a token outside the model's vocabulary."""
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
        """Number of samples: each counts as a record."""
        return self._count

    def prompts(self) -> Array:
        """[samples] numbers that are unique to the data and the sample, since a sample has no prompt."""
        first = np.frombuffer(self._digest([self._key[0]])[:8], dtype=np.uint64)
        return np.arange(self._count).astype(np.uint64) + first

    def digest(self) -> str:
        """Digest of the data (`Indexed.digest`) and of the way it is cut into samples."""
        return self._digest(self._key).hex()

    def _digest(self, key: list[str]) -> bytes:
        return hashlib.sha256("/".join([self._indexed.digest, *key]).encode()).digest()

    def ends(self, most: int = 100) -> set[int]:
        """Last tokens of the first documents. They should be the tokenizer's end of sequence (`--append-eod`)."""
        sequences = (self._indexed.sequence(int(document)) for document in self._order[:most])
        return {int(sequence[-1]) for sequence in sequences if len(sequence)}


@dataclass(frozen=True)
class IndexedOptions(Generic[Sample]):
    """Options of reading indexed data."""

    sequence_length: int
    """Learnt tokens of a sample, which has one token more."""
    seed: int
    make: Callable[[list[int]], Sample]
    """Makes a sample from token ids."""
    vocab_size: int | None = None

    def open(self, source: SourceConfig, part: str) -> IndexedSamples[Sample]:
        """The samples of one set. Raises: ValueError."""
        indexed = read_index(source.path)
        chosen = split_range(source.split, part, len(indexed.lengths))
        return IndexedSamples(indexed, chosen, self.sequence_length, self.seed, self.make, self.vocab_size)


def learnt_whole(tokens: list[int]) -> SFTSample:
    """A sample in which every token but the first is learnt."""
    return SFTSample(tokens, [1, len(tokens)])
