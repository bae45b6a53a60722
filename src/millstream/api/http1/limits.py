"""Limits on a connection: sizes, times and numbers that hold before its request reaches the application."""

from __future__ import annotations

from dataclasses import dataclass

SLICE = 16 * 1024
"""Bytes that the parser gets at a time. Limits are checked in between."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    line_bytes: int = 16 * 1024
    """The URL of the request line."""
    head_bytes: int = 64 * 1024
    """Request line and headers together. Also limits the trailers of a chunked body."""
    headers: int = 128
    header_seconds: float = 20.0
    """Time for all headers, from their first byte on; on a new connection, from its start. 0 disables it."""
    body_seconds: float = 30.0
    """Longest time without a byte of the body; also the grace period of the rate below. 0 disables both."""
    body_rate: int = 1024
    """Minimum average rate of the body, in bytes per second."""
    write_seconds: float = 60.0
    """Time within which a client must read some of its pending output. 0 disables it."""
    overhead: int = 16
    """Bytes of chunk framing per byte of a chunked body, beyond `head_bytes`."""
    pipelined: int = 8
    """Pipelined requests that may wait for an earlier response."""
    pipelined_bytes: int = 64 * 1024
    """Bytes that a client may send ahead of its response."""
    linger_seconds: float = 2.0
    """Time to read a refusal before the connection is aborted."""
    linger_bytes: int = 64 * 2**20
    """Bytes that a refused client may still send. They are dropped."""
    lingering: int = 64
    """Refused connections that may linger at once, in addition to `connections`. The oldest are aborted beyond it."""
    connections: int = 1000
    reserve: int = 256
    """Open files of the process that are reserved for everything but connections."""

    @property
    def tick(self) -> float:
        """Seconds between two checks of all connections."""
        spans = (self.header_seconds, self.body_seconds, self.write_seconds, self.linger_seconds)
        return min([1.0, *(span / 4 for span in spans if span)])

    def connections_within(self, open_files: int | None) -> int:
        """The cap on connections under a limit of open files: it leaves the reserve, or half of a small limit."""
        if open_files is None:
            return self.connections
        return max(1, min(self.connections, max(open_files - self.reserve, open_files // 2)))

    def lingering_within(self, connections: int) -> int:
        return max(1, min(self.lingering, connections // 4))
