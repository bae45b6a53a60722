"""Writes to a response that has begun, past ASGI: `send` costs more than the bytes of one token."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_SIZES = [b"%x\r\n" % size for size in range(4096)]
"""The line before a chunk, by its length."""


class CycleWriter:
    """Implements `stream.DirectWriter` for one request: it writes what uvicorn's `send` would write."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def ready(self) -> bool:
        """Only chunked bodies: of others the length is known, and uvicorn counts it."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        return cycle.chunked_encoding is True

    def write(self, data: bytes) -> None:
        size = len(data)
        line = _SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size
        self._write(line + data + b"\r\n")
