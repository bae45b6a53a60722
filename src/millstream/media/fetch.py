"""Fetches a file over HTTP: from public addresses, within a time and a size, following few redirects."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable
from urllib.parse import SplitResult, urljoin, urlsplit

import certifi
from typing_extensions import Buffer

from millstream.errors import MediaRefused
from millstream.media.addresses import LookUp, addresses_of, system_look_up
from millstream.media.limits import MediaLimits

REDIRECTS = 3
PIECE = 64 * 1024
_MOVED = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"user-agent": "millstream", "accept": "image/*, audio/*, video/*, */*;q=0.5", "accept-encoding": "identity"}


def fetch(url: str, limits: MediaLimits, look_up: LookUp = system_look_up) -> bytes:
    """The body behind `url`. Raises `MediaRefused` with what was wrong."""
    deadline = time.monotonic() + limits.seconds
    for _ in range(REDIRECTS + 1):
        body, moved = _get(url, limits, look_up, deadline)
        if moved is None:
            return body
        url = urljoin(url, moved)
    raise MediaRefused(f"a media URL is redirected more than {REDIRECTS} times; send where it leads to")


def _get(url: str, limits: MediaLimits, look_up: LookUp, deadline: float) -> tuple[bytes, str | None]:
    """The body, or where it has moved to."""
    parts = _checked(url)
    connection = _Connection(parts, limits, look_up, deadline)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers=_HEADERS)
        response = connection.getresponse()
        moved = response.getheader("location")
        if response.status in _MOVED and moved is not None:
            return b"", moved
        if response.status != http.client.OK:
            raise MediaRefused(f"{_short(url)} answered {response.status} {response.reason}: 200 was expected")
        return _read(response, limits), None
    except TimeoutError as error:
        raise MediaRefused(f"{_short(url)} took longer than {limits.seconds:g} s (--media-timeout)") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise MediaRefused(f"{_short(url)} cannot be fetched: {error or type(error).__name__}") from error
    finally:
        connection.hang_up()


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise MediaRefused(f"{_short(url)} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise MediaRefused(
            f"{_short(url)} is not a URL that can be fetched: write http://host/path or https://host/path"
        )
    if not url.isascii() or not url.isprintable() or " " in url:
        raise MediaRefused(f"{_short(url)} holds characters that a URL cannot have: write them as %XX")
    return parts


class _Connection(http.client.HTTPConnection):
    """Connects to addresses that were checked, and never waits past the deadline."""

    def __init__(self, parts: SplitResult, limits: MediaLimits, look_up: LookUp, deadline: float) -> None:
        secure = parts.scheme == "https"
        super().__init__(parts.hostname or "", parts.port or (443 if secure else 80))
        self._secure = secure
        self._private = limits.private
        self._look_up = look_up
        self._deadline = deadline
        self._raw: socket.socket | None = None

    def connect(self) -> None:
        self._raw = self._reach()
        if self._secure:
            self._raw = _tls().wrap_socket(self._raw, server_hostname=self.host)
        self.sock = _Timed(self._raw, self._left)

    def hang_up(self) -> None:
        if self._raw is not None:
            self._raw.close()

    def _reach(self) -> socket.socket:
        failure = OSError("it has no address")
        found = addresses_of(self.host, self.port, private=self._private, look_up=self._look_up, seconds=self._left())
        for address in found:
            try:
                return socket.create_connection((address, self.port), timeout=self._left())
            except TimeoutError:
                raise
            except OSError as error:
                failure = error
        raise failure

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _Timed(io.RawIOBase):
    """A socket as `http.client` uses one, whose every read and write gets what is left of the time: a timeout of its
    own for each would let a host that sends a byte at a time go on for ever. Closing is left to `hang_up`."""

    def __init__(self, inner: socket.socket, left: Callable[[], float]) -> None:
        self._inner = inner
        self._left = left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        self._inner.settimeout(self._left())
        return self._inner.recv_into(buffer)

    def sendall(self, data: Buffer) -> None:
        self._inner.settimeout(self._left())
        self._inner.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def close(self) -> None:
        """Not yet: what is buffered here belongs to a response that is still read."""


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _read(response: http.client.HTTPResponse, limits: MediaLimits) -> bytes:
    if response.length is not None and response.length > limits.size:
        raise too_large(response.length, limits)
    pieces: list[bytes] = []
    seen = 0
    while True:
        piece = response.read1(PIECE)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        seen += len(piece)
        if seen > limits.size:
            raise too_large(seen, limits)


def too_large(size: int, limits: MediaLimits) -> MediaRefused:
    return MediaRefused(f"a media file has {size} bytes or more; this server takes {limits.size} (--media-bytes)")


def _short(url: str) -> str:
    return repr(url if len(url) <= 100 else url[:97] + "...")
