"""JSON lines and JSON arrays of any length, parsed row by row.

`datasets` is not used: it turns strings that look like dates into datetimes, fills a misspelt field with nulls, and
reports a broken line without its number. A key that occurs twice in an object is an error here.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

_FRAGMENT = 80
_PIECE = 1 << 20
_CUT_WORD = 16
"""Characters at the end of the buffer in which a parse error may come from the cut: `-Infinit`, `\\u12`."""


def begins_with_bracket(head: bytes) -> bool:
    """Tell whether a file with this beginning is one array. Its first character decides, not its name."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def parse_line(raw: bytes, name: str, line: int) -> Any:
    """Parse a row of JSON lines. Raises: ValueError with file and line."""
    try:
        # Without rstrip, a value that is cut off would be reported on the next line.
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8").rstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}, line {line}: not UTF-8 ({error.reason}); convert the file") from error
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except DuplicateKey as error:
        raise ValueError(f"{name}, line {line}: {error}; expected each key once: remove or rename one") from error
    except json.JSONDecodeError as error:
        raise _malformed(error, text, name, line) from error


def parse_array(stream: BinaryIO, name: str) -> Iterator[Any]:
    """Yield the rows of an array. No more than a piece of the file and a row is held. Raises: ValueError with file and
    line."""
    decoder = json.JSONDecoder(object_pairs_hook=object_of)
    text = _Text(stream, name)
    text.expect("[")
    row_number = 0
    while not text.skip("]"):
        row_number += 1
        if row_number > 1:
            text.expect(",")
            text.skip("")
        while True:
            try:
                row, end = decoder.raw_decode(text.text, text.position)
                break
            except DuplicateKey as error:
                raise ValueError(
                    f"{name}, row {row_number}: {error}; expected each key once: remove or rename one"
                ) from error
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(text.text) - _CUT_WORD
                if not (cut and text.more()):
                    raise _malformed(error, text.text, name, text.line) from error
        text.position = end
        yield row
    text.skip("")
    if text.position < len(text.text):
        raise text.error("expected the end of the file")


class _Text:
    """A buffer with the text that was read of a file and is not parsed yet."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.position, self.line, self._size = "", 0, 1, _PIECE

    def more(self) -> bool:
        """Read on, and drop what was parsed. False at the end of the file. A long row is read in growing pieces."""
        raw = self._stream.read(self._size)
        try:
            more = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n") + raw.count(b"\n", 0, error.start)
            raise ValueError(f"{self._name}, line {line}: not UTF-8 ({error.reason}); convert the file") from error
        if not raw:
            return False
        self.line += self.text.count("\n", 0, self.position)
        self.text, self.position = self.text[self.position :] + more, 0
        self._size = max(_PIECE, len(self.text))
        return True

    def skip(self, character: str) -> bool:
        """Skip white space, and `character` if it follows. Returns whether it did."""
        while True:
            while self.position < len(self.text) and self.text[self.position] in " \t\r\n":
                self.position += 1
            if self.position < len(self.text) or not self.more():
                break
        here = self.text[self.position : self.position + 1]
        if character and here == character:
            self.position += 1
            return True
        return False

    def expect(self, character: str) -> None:
        if not self.skip(character):
            raise self.error(f"expected {character!r}")

    def error(self, message: str) -> ValueError:
        error = json.JSONDecodeError(message, self.text, self.position)
        return _malformed(error, self.text, self._name, self.line)


def _malformed(error: json.JSONDecodeError, text: str, name: str, first_line: int) -> ValueError:
    fragment = text[max(error.pos - _FRAGMENT // 2, 0) : error.pos + _FRAGMENT // 2].strip()
    return ValueError(
        f"{name}, line {first_line + error.lineno - 1}: malformed JSON ({error.msg}, column {error.colno}) near "
        f"{fragment!r}; expected one JSON object a line"
    )


class DuplicateKey(ValueError):
    """A key that occurs twice in an object. `json` would silently keep its last value."""


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Hook of the JSON parser: an object from its keys and values. Raises: DuplicateKey."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in row if keys.count(key) > 1)
        values = ", ".join(shown(value) for key, value in pairs if key == twice)
        raise DuplicateKey(f"the key {twice!r} is {keys.count(twice)} times in one object, with {values}")
    return row


def shown(value: Any) -> str:
    """Shorten a value for a message."""
    text = repr(value)
    return text if len(text) <= _FRAGMENT else text[:_FRAGMENT] + "..."
