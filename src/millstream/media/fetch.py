"""Fetches a file over HTTP: from public addresses, within a time and a size, following few redirects."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable
from urllib.parse import SplitResult, urljoin, urlsplit

import certifi

from millstream.errors import MediaRefused
from millstream.media.addresses import addresses_of
from millstream.media.limits import MediaLimits

REDIRECTS = 3
PIECE = 64 * 1024
_MOVED = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"user-agent": "millstream", "accept": "image/*, audio/*, video/*, */*;q=0.5", "accept-encoding": "identity"}


def fetch(url: str, limits: MediaLimits) -> bytes:
    """The body behind `url`. Raises `MediaRefused` with what was wrong."""
    deadline = time.monotonic() + limits.seconds
    for _ in range(REDIRECTS + 1):
        body, moved = _get(url, limits, deadline)
        if moved is None:
            return body
        url = urljoin(url, moved)
    raise MediaRefused(f"a media URL is redirected more than {REDIRECTS} times; send where it leads to")


def _get(url: str, limits: MediaLimits, deadline: float) -> tuple[bytes, str | None]:
    """The body, or where it has moved to."""
    parts = _checked(url)
    connection = _Connection(parts, limits, deadline)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers=_HEADERS)
        response = connection.getresponse()
        moved = response.getheader("location")
        if response.status in _MOVED and moved is not None:
            return b"", moved
        if response.status != http.client.OK:
            raise MediaRefused(f"{_short(url)} answered {response.status} {response.reason}: 200 was expected")
        return _read(response, limits, connection.arm), None
    except TimeoutError as error:
        raise MediaRefused(f"{_short(url)} took longer than {limits.seconds:g} s (--media-timeout)") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise MediaRefused(f"{_short(url)} cannot be fetched: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise MediaRefused(f"{_short(url)} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise MediaRefused(f"{_short(url)} is not a URL that can be fetched: write http://host/path or https://host/path")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise MediaRefused(f"{_short(url)} holds characters that a URL cannot have: write them as %XX")
    return parts


class _Connection(http.client.HTTPConnection):
    """Connects to addresses that were checked, and never waits past the deadline."""

    def __init__(self, parts: SplitResult, limits: MediaLimits, deadline: float) -> None:
        secure = parts.scheme == "https"
        super().__init__(parts.hostname or "", parts.port or (443 if secure else 80))
        self._secure = secure
        self._private = limits.private
        self._deadline = deadline

    def connect(self) -> None:
        failure: OSError | None = None
        for _, address in addresses_of(self.host, self.port, private=self._private):
            try:
                self.sock = socket.create_connection((address, self.port), timeout=self._left())
            except TimeoutError:
                raise
            except OSError as error:
                failure = error
            else:
                failure = None
                break
        if failure is not None:
            raise failure
        if self._secure:
            self.sock = _tls().wrap_socket(self.sock, server_hostname=self.host)

    def arm(self) -> None:
        """Before each read: what is left of the time."""
        if self.sock is not None:
            self.sock.settimeout(self._left())

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _read(response: http.client.HTTPResponse, limits: MediaLimits, arm: Callable[[], None]) -> bytes:
    if response.length is not None and response.length > limits.size:
        raise too_large(response.length, limits)
    pieces, seen = [], 0
    while True:
        arm()
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
