"""Measures how much of a request has been received and for how long, and checks it against the limits."""

from __future__ import annotations

from enum import Enum

from millstream.api.http1.limits import HttpLimits
from millstream.errors import BadRequest, HeadersTooLarge, MillstreamError, RequestTimeout, UrlTooLong


class Stage(Enum):
    """What the parser is reading."""

    NOTHING = "nothing"
    HEAD = "head"
    BODY = "body"


class Meter:
    """Counts the bytes of one request after another. Each check returns an error, or None if all limits hold."""

    __slots__ = ("_body", "_fields", "_limits", "_wire", "last_byte", "since", "stage")

    def __init__(self, limits: HttpLimits, clock: float) -> None:
        self._limits = limits
        self.stage = Stage.NOTHING
        self.since = self.last_byte = clock
        """When the current stage began; when the last byte was received."""
        self._wire = self._fields = self._body = 0

    def begin(self, stage: Stage, clock: float | None = None) -> None:
        """Without a clock, the time continues: on a new connection, the headers are timed from its start."""
        self.stage = stage
        self._wire = self._fields = self._body = 0
        if clock is not None:
            self.since = clock

    def restart(self, clock: float) -> None:
        """Reset the time and the counts: the client was not responsible for the time that passed."""
        self._wire = self._body = 0
        self.since = self.last_byte = clock

    def add_wire(self, size: int) -> None:
        self._wire += size

    def add_body(self, size: int) -> None:
        self._body += size

    def check_url(self, size: int) -> MillstreamError | None:
        if size > self._limits.line_bytes:
            return UrlTooLong(f"The URL is longer than {self._limits.line_bytes} bytes.")
        return None

    def check_header(self, size: int, number: int) -> MillstreamError | None:
        """Also applies to trailers."""
        self._fields += size
        if self._fields > self._limits.head_bytes or number > self._limits.headers:
            return self._too_large()
        return None

    def check_size(self, *, responded: bool) -> MillstreamError | None:
        """Call once per slice: bytes that the parser buffers internally show up nowhere else."""
        limits = self._limits
        if self.stage is Stage.HEAD and self._wire > limits.head_bytes:
            return self._too_large()
        if self.stage is Stage.BODY and self._wire - self._body * limits.overhead > limits.head_bytes:
            return BadRequest("The chunks of the body are too small, or their extensions or trailers are too long.")
        if self.stage is Stage.BODY and responded and self._wire > limits.linger_bytes:
            return BadRequest("The body continues after its response.")
        return None

    def check_time(self, clock: float) -> MillstreamError | None:
        limits = self._limits
        if self.stage is Stage.HEAD and limits.header_seconds and clock - self.since > limits.header_seconds:
            return RequestTimeout(
                f"The headers of the request were not complete within {limits.header_seconds:g} s (--header-timeout)."
            )
        if self.stage is not Stage.BODY or not limits.body_seconds:
            return None
        allowed = limits.body_seconds + self._body / limits.body_rate
        if clock - self.last_byte <= limits.body_seconds and clock - self.since <= allowed:
            return None
        return RequestTimeout(
            f"The body of the request was too slow: {limits.body_seconds:g} s without a byte (--body-timeout), "
            f"or fewer than {limits.body_rate} bytes per second."
        )

    def _too_large(self) -> HeadersTooLarge:
        limits = self._limits
        return HeadersTooLarge(
            f"The headers are larger than {limits.head_bytes} bytes, or there are more than {limits.headers}."
        )
