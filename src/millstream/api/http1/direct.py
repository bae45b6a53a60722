"""What a response needs of its connection, past ASGI: `send` costs more than the bytes of one token, and to wait in
`receive` for a client that leaves takes a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_SIZES = [b"%x\r\n" % size for size in range(4096)]
"""The line before a chunk, by its length."""


class CycleDeparture:
    """Implements `disconnect.Departure` for one request. The protocol calls `left`."""

    __slots__ = ("_call", "_cycle")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._call: Callable[[], None] | None = None

    def watch(self, call: Callable[[], None]) -> None:
        self._call = call
        if self._cycle.disconnected:
            asyncio.get_running_loop().call_soon(self.left)
        else:
            self._cycle.flow.resume_reading()  # it pauses at a large body, and then no disconnect is seen

    def unwatch(self) -> None:
        self._call = None

    def left(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


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
