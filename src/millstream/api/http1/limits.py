"""What a connection may cost before its request is understood."""

from __future__ import annotations

from dataclasses import dataclass

SLICE = 16 * 1024
"""Bytes that the parser gets at once. Limits are checked in between."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    line_bytes: int = 16 * 1024
    """The URL of the request line."""
    head_bytes: int = 64 * 1024
    """Request line and headers together; the trailers of a chunked body, too."""
    headers: int = 128
    header_seconds: float = 20.0
    """For all of the headers, from the first byte on; for a new connection from the start. 0: no limit."""
    body_seconds: float = 30.0
    """Without a byte of the body; also the head start for the rate below. 0: no limit."""
    body_rate: int = 1024
    """Bytes of the body a second, on average."""
    write_seconds: float = 60.0
    """In which a client must read something of what waits for it. 0: no limit."""
    overhead: int = 16
    """Bytes of chunk framing for one byte of a chunked body, above `head_bytes`."""
    pipelined: int = 8
    """Requests that may wait for the answer before them."""
    held_bytes: int = 64 * 1024
    """Bytes that a client may send ahead of its answer."""
    linger_seconds: float = 2.0
    """For reading a refusal, before the connection is cut."""
    linger_bytes: int = 64 * 2**20
    """Bytes that a refused client may still send; they are dropped."""
    lingering: int = 64
    """Refused connections that may linger at once, beside `connections`. The first of them are cut for the next."""
    connections: int = 1000
    reserve: int = 256
    """Files of the process that connections leave to everything else."""

    @property
    def tick(self) -> float:
        """How often connections are looked at, in seconds."""
        spans = (self.header_seconds, self.body_seconds, self.write_seconds, self.linger_seconds)
        return min([1.0, *(span / 4 for span in spans if span)])

    def connections_within(self, open_files: int | None) -> int:
        """The cap on connections under a limit of open files: a reserve is left, of a small limit one half."""
        if open_files is None:
            return self.connections
        return max(1, min(self.connections, max(open_files - self.reserve, open_files // 2)))

    def lingering_within(self, connections: int) -> int:
        return max(1, min(self.lingering, connections // 4))
