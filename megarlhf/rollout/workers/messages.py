"""Messages over one end of a pipe, for a reader that has other things to do meanwhile.

`multiprocessing.connection.Connection` waits in the middle of a message for as long as the other process is busy. Only
the standard library is imported.
"""

from __future__ import annotations

import os
import pickle
import struct
from multiprocessing.connection import Connection
from typing import Any

_LENGTH = struct.Struct("<Q")
_CHUNK = 2**20
"""Most bytes of one read or write."""


class MessageStream:
    """Pickled messages, each behind its length. Neither method waits if the end of the pipe is set not to block."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unsent, self._unread = bytearray(), bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def put(self, message: Any) -> None:
        """Add a message to what `send` sends."""
        content = pickle.dumps(message)
        self._unsent += _LENGTH.pack(len(content)) + content

    def send(self) -> None:
        """Send as much as the pipe takes. Raises: OSError if the other end is closed."""
        try:
            while self._unsent:
                sent = os.write(self._connection.fileno(), self._unsent[:_CHUNK])
                del self._unsent[:sent]
        except BlockingIOError:
            pass

    def receive(self) -> list[Any]:
        """Messages that are complete after one read. Raises: EOFError or OSError if the other end is closed."""
        try:
            content = os.read(self._connection.fileno(), _CHUNK)
        except BlockingIOError:
            return []
        if not content:
            raise EOFError
        self._unread += content
        messages = []
        while len(self._unread) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                break
            messages.append(pickle.loads(self._unread[_LENGTH.size : end]))
            del self._unread[:end]
        return messages
