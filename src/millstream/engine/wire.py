"""Frames on the socket between a server and an engine's process: four bytes of length, then a pickle."""

from __future__ import annotations

import pickle
import socket
from struct import Struct
from typing import Any

_LENGTH = Struct(">I")
_PIECE = 2**18
"""Bytes that are read at once."""
_BUFFER = 2**20
"""Bytes that may be on their way, as far as the system allows: a side that is busy for a moment stops nobody."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection within this machine."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return ends


def frame(message: object) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Reads what has come, and never waits for more. Used on one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._data = bytearray()
        """The beginning of a frame whose rest has not come."""

    def read(self) -> list[Any] | None:
        """Returns the messages that are complete after one read; None if nothing had come. Raises `EOFError` or an
        `OSError` if the other side is gone."""
        try:
            piece = self._end.recv(_PIECE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not piece:
            raise EOFError("the other side has closed the connection")
        data = self._data
        data += piece
        messages: list[Any] = []
        start, size = 0, len(data)
        with memoryview(data) as view:
            while size - start >= _LENGTH.size:
                end = start + _LENGTH.size + _LENGTH.unpack_from(view, start)[0]
                if end > size:
                    break
                messages.append(pickle.loads(view[start + _LENGTH.size : end]))
                start = end
        del data[:start]
        return messages


def read_first(end: socket.socket) -> Any:
    """Waits for the first message, and takes nothing of the next. Raises `EOFError` if it does not come."""
    (size,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    return pickle.loads(_exactly(end, size))


def _exactly(end: socket.socket, size: int) -> bytes:
    data = end.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError("the other side has closed the connection")
    return data
