"""Archives as torch.save makes them: zip without compression, records aligned by padding in their headers."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

ALIGNMENT = 64
BUFFER_BYTES = 16 << 20
_LOCAL = struct.Struct("<4s5HIIIHH")
_CENTRAL = struct.Struct("<4s6HIIIHHHHHII")
_CENTRAL_CRC = 16
_LOCAL_CRC = 14
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_FULL = 0xFFFFFFFF
"""A 32-bit field whose value is in the zip64 extra field."""


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record of an archive; positions are bytes from the start of the file."""

    name: str
    start: int
    size: int
    crc: int
    """0 with size > 0: not recorded (torch writes that under `set_crc32_options(False)`)."""
    header: int
    """Position of the local header."""
    central: int
    """Position of the entry in the central directory."""


def damaged(path: Path, problem: str) -> ValueError:
    return ValueError(f"{path} is truncated or damaged: {problem}; copy it again from its source")


class FileRange:
    """A range of an open file; a read past its end is the file's fault."""

    def __init__(self, file: BinaryIO, path: Path, offset: int, length: int | None) -> None:
        self.file, self.path, self.offset = file, path, offset
        size = file.seek(0, io.SEEK_END)
        self.length = size - offset if length is None else length
        if offset + self.length > size or self.length < 0:
            raise damaged(path, f"it has {size} bytes, expected {offset + self.length}")

    def read(self, at: int, size: int) -> bytes:
        if at < 0 or at + size > self.length:
            raise damaged(self.path, f"bytes {at} to {at + size} are needed and there are {self.length}")
        self.file.seek(self.offset + at)
        return self.file.read(size)

    def fields(self, kind: struct.Struct, at: int, signature: bytes, name: str) -> tuple[Any, ...]:
        values = kind.unpack(self.read(at, kind.size))
        if values[0] != signature:
            raise damaged(self.path, f"no {name} at byte {self.offset + at}")
        return values[1:]

    def crc(self, at: int, size: int) -> int:
        value, buffer = 0, memoryview(bytearray(min(BUFFER_BYTES, size)))
        self.file.seek(self.offset + at)
        while size > 0:
            got = self.file.readinto(buffer[: min(BUFFER_BYTES, size)])  # type: ignore[attr-defined]
            if not got:
                raise damaged(self.path, f"{size} bytes are missing at its end")
            value = zlib.crc32(buffer[:got], value)
            size -= got
        return value


def zip_records(part: FileRange) -> list[ZipRecord]:
    """Every record, in the order of the file.

    Raises: ValueError when the headers disagree, or records overlap or leave the range.
    """
    count, size, begin, end = _directory(part)
    at, records = begin, []
    for _ in range(count):
        record, at = _zip_record(part, at)
        records.append(record)
    if at != begin + size or at != end:
        raise damaged(part.path, f"its directory ends at byte {part.offset + at}, expected {part.offset + end}")
    records.sort(key=lambda record: record.header)
    limits = [record.header for record in records[1:]] + [part.offset + begin]
    for record, limit in zip(records, limits, strict=True):
        if record.start + record.size > limit:
            raise damaged(part.path, f"record {record.name} runs into the next")
    return records


def _directory(part: FileRange) -> tuple[int, int, int, int]:
    """(records, bytes, position, position of what follows) of the central directory."""
    head = part.read(0, min(4, part.length))
    if not head.startswith(b"PK\x03\x04"):
        if head.startswith(b"\x80"):
            raise ValueError(
                f"{part.path} is a pickle, expected the zip format that torch.save writes since torch 1.6. If you "
                "trust the file, read it with torch.load and write it again with torch.save"
            )
        raise damaged(part.path, f"it starts with {head!r}, expected the zip format of torch.save")
    at = part.length - _END.size
    *_, count, size, begin, comment = part.fields(_END, at, b"PK\x05\x06", "end of the zip archive")
    if comment:
        raise damaged(part.path, "its archive has a comment, torch.save writes none")
    locator = at - _LOCATOR.size
    if locator >= 0 and part.read(locator, 4) == b"PK\x06\x07":
        _, at, _ = part.fields(_LOCATOR, locator, b"PK\x06\x07", "zip64 locator")
        *_, count, size, begin = part.fields(_END64, at, b"PK\x06\x06", "zip64 end of the archive")
    if count > part.length // _CENTRAL.size:
        raise damaged(part.path, f"its directory claims {count} records")
    return count, size, begin, at


def _zip_record(part: FileRange, at: int) -> tuple[ZipRecord, int]:
    """The record of the directory's entry at `at`, and the position of the next entry."""
    fields = part.fields(_CENTRAL, at, b"PK\x01\x02", "entry of the directory")
    _, _, flags, method, _, _, crc, packed, size, name_size, extra_size, comment_size, *_, header = fields
    name = part.read(at + _CENTRAL.size, name_size).decode("utf-8", "replace")
    extra = _extra_fields(part, at + _CENTRAL.size + name_size, extra_size).get(1, b"")
    wide = struct.iter_unpack("<Q", extra[: len(extra) // 8 * 8])
    try:
        size = next(wide)[0] if size == _FULL else size
        packed = next(wide)[0] if packed == _FULL else packed
        header = next(wide)[0] if header == _FULL else header
    except StopIteration:
        raise damaged(part.path, f"record {name} has no zip64 sizes") from None
    if method or flags & 1 or packed != size:
        raise damaged(part.path, f"record {name} is compressed or encrypted, which torch.save never does")
    local = part.fields(_LOCAL, header, b"PK\x03\x04", f"header of record {name}")
    if part.read(header + _LOCAL.size, local[-2]).decode("utf-8", "replace") != name:
        raise damaged(part.path, f"record {name} has another name in its header")
    start = header + _LOCAL.size + local[-2] + local[-1]
    _extra_fields(part, start - local[-1], local[-1])
    if flags & 8 and part.read(start + size, 4) != b"PK\x07\x08":
        raise damaged(part.path, f"record {name} does not end where its header says")
    record = ZipRecord(name, part.offset + start, size, crc, part.offset + header, part.offset + at)
    return record, at + _CENTRAL.size + name_size + extra_size + comment_size


def _extra_fields(part: FileRange, at: int, size: int) -> dict[int, bytes]:
    """A header's extra fields by id; they must fill their space exactly."""
    raw, fields = part.read(at, size), {}
    while raw:
        if len(raw) < 4:
            raise damaged(part.path, f"bytes left in an extra field at {part.offset + at}")
        kind, length = struct.unpack_from("<HH", raw)
        if len(raw) < 4 + length:
            raise damaged(part.path, f"an extra field at {part.offset + at} is too long")
        fields[kind] = raw[4 : 4 + length]
        raw = raw[4 + length :]
    return fields


def open_binary(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}), expected a file of torch.save") from error


def write_crc(file: BinaryIO, record: ZipRecord, crc: int) -> None:
    """States a record's CRC-32 in both of its headers."""
    for at in (record.header + _LOCAL_CRC, record.central + _CENTRAL_CRC):
        file.seek(at)
        file.write(struct.pack("<I", crc))


class ZipWriter:
    """Writes an archive of named records at an offset of an open file; reserved ones are holes."""

    def __init__(self, file: BinaryIO, offset: int, prefix: str) -> None:
        self._file, self._offset, self._prefix = file, offset, prefix
        self._at = 0
        self._central: list[bytes] = []

    def add(self, name: str, data: bytes) -> None:
        self._begin(name, len(data), zlib.crc32(data))
        self._file.write(data)

    def reserve(self, name: str, size: int) -> int:
        """Position in the file of `size` bytes to be written later; their CRC is not stated."""
        return self._begin(name, size, 0)

    def finish(self) -> int:
        """Writes the directory; returns the end of the archive in the file."""
        self._file.seek(self._offset + self._at)
        directory = b"".join(self._central)
        count, size, begin = len(self._central), len(directory), self._at
        end = begin + size
        self._file.write(directory)
        self._file.write(_END64.pack(b"PK\x06\x06", _END64.size - 12, 798, 45, 0, 0, count, count, size, begin))
        self._file.write(_LOCATOR.pack(b"PK\x06\x07", 0, end, 1))
        short = min(count, 0xFFFF)
        self._file.write(_END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, _FULL), min(begin, _FULL), 0))
        return self._offset + end + _END64.size + _LOCATOR.size + _END.size

    def _begin(self, name: str, size: int, crc: int) -> int:
        raw = f"{self._prefix}/{name}".encode()
        header = self._at
        wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= _FULL else b""
        pad = -(header + _LOCAL.size + len(raw) + len(wide) + 4) % ALIGNMENT
        extra = wide + struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        version = 45 if size >= _FULL or header >= _FULL else 20
        short = min(size, _FULL)
        self._file.seek(self._offset + header)
        self._file.write(
            _LOCAL.pack(b"PK\x03\x04", version, 0x800, 0, 0, 0x21, crc, short, short, len(raw), len(extra))
            + raw
            + extra
        )
        sizes = [size, size] if size >= _FULL else []
        sizes += [header] if header >= _FULL else []
        wide = struct.pack(f"<HH{len(sizes)}Q", 1, 8 * len(sizes), *sizes) if sizes else b""
        fields = (version, version, 0x800, 0, 0, 0x21, crc, short, short, len(raw), len(wide), 0, 0, 0, 0)
        self._central.append(_CENTRAL.pack(b"PK\x01\x02", *fields, min(header, _FULL)) + raw + wide)
        start = header + _LOCAL.size + len(raw) + len(extra)
        self._at = start + size
        return self._offset + start
