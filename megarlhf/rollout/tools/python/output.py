"""Output of a child: the first and the last half of a limit are kept. Only the standard library is imported."""

from __future__ import annotations

import os

_READ_BYTES = 1 << 16


class Output:
    """Bytes that a pipe has brought."""

    def __init__(self, fd: int, limit: int) -> None:
        os.set_blocking(fd, False)
        self._fd, self._half = fd, limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self.length = 0
        """Number of bytes that came, with the dropped ones."""
        self.note = ""
        """Text for the last line."""

    def read(self) -> bool:
        """Read once. Returns whether more may come."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return True
        self.length += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-self._half :]
        return bool(data)

    def read_rest(self) -> None:
        """Read what is in the pipe. No process may be left that writes to it."""
        before = -1
        while before != self.length:
            before = self.length
            self.read()

    def text(self) -> str:
        head, tail = self._head, self._tail
        if dropped := self.length - len(head) - len(tail):
            text = f"{_decode(head)}\n... ({dropped} bytes of output were dropped) ...\n{_decode(tail)}"
        else:
            text = _decode(head + tail)  # a character may be at the border
        if self.note:
            text = f"{text}\n{self.note}" if text and not text.endswith("\n") else text + self.note
        return text.rstrip("\n")


def _decode(data: bytearray) -> str:
    return data.decode("utf-8", "replace")
