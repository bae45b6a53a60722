"""How much of a request has come, and for how long it has been coming."""

from __future__ import annotations

from enum import Enum

from millstream.api.http1.limits import HttpLimits
from millstream.errors import BadRequest, HeadersTooLarge, MillstreamError, RequestTimeout, UrlTooLong


class Stage(Enum):
    """How far the parser is."""

    NOTHING = "nothing"
    HEAD = "head"
    BODY = "body"


class Meter:
    """Counts the bytes of one request after another. Its checks return an error, or None while all is well."""

    __slots__ = ("_body", "_fields", "_limits", "_wire", "seen", "since", "stage")

    def __init__(self, limits: HttpLimits, clock: float) -> None:
        self._limits = limits
        self.stage = Stage.NOTHING
        self.since = self.seen = clock
        """When the present stage began; when the last byte came."""
        self._wire = self._fields = self._body = 0

    def begin(self, stage: Stage, clock: float | None = None) -> None:
        """Without a clock the time goes on: that of a new connection counts from its start."""
        self.stage = stage
        self._wire = self._fields = self._body = 0
        if clock is not None:
            self.since = clock

    def restart(self, clock: float) -> None:
        """What has passed was not the client's time."""
        self._wire = self._body = 0
        self.since = self.seen = clock

    def add_wire(self, size: int) -> None:
        self._wire += size

    def add_body(self, size: int) -> None:
        self._body += size

    def check_url(self, size: int) -> MillstreamError | None:
        if size > self._limits.line_bytes:
            return UrlTooLong(f"The URL is longer than {self._limits.line_bytes} bytes.")
        return None

    def check_header(self, size: int, number: int) -> MillstreamError | None:
        """For headers and for trailers."""
        self._fields += size
        if self._fields > self._limits.head_bytes or number > self._limits.headers:
            return self._too_large()
        return None

    def check_size(self, *, answered: bool) -> MillstreamError | None:
        """Once for each slice: what the parser keeps to itself is seen nowhere else."""
        limits = self._limits
        if self.stage is Stage.HEAD and self._wire > limits.head_bytes:
            return self._too_large()
        if self.stage is Stage.BODY and self._wire - self._body * limits.overhead > limits.head_bytes:
            return BadRequest("The chunks of the body are too small, or their extensions or trailers too long.")
        if self.stage is Stage.BODY and answered and self._wire > limits.linger_bytes:
            return BadRequest("The body goes on after its answer.")
        return None

    def check_time(self, clock: float) -> MillstreamError | None:
        limits = self._limits
        if self.stage is Stage.HEAD and limits.header_seconds and clock - self.since > limits.header_seconds:
            return RequestTimeout(
                f"The headers of the request did not come within {limits.header_seconds:g} s (--header-timeout)."
            )
        if self.stage is not Stage.BODY or not limits.body_seconds:
            return None
        fair = limits.body_seconds + self._body / limits.body_rate
        if clock - self.seen <= limits.body_seconds and clock - self.since <= fair:
            return None
        return RequestTimeout(
            f"The body of the request came too slowly: {limits.body_seconds:g} s without a byte (--body-timeout), "
            f"or less than {limits.body_rate} bytes a second."
        )

    def _too_large(self) -> HeadersTooLarge:
        limits = self._limits
        return HeadersTooLarge(f"The headers are larger than {limits.head_bytes} bytes or more than {limits.headers}.")
