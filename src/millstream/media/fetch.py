"""Fetches a media URL over HTTP(S), within limits on addresses, time, size and redirects.

Runs on the network threads: every call blocks.
"""

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
from millstream.media.addresses import Lookup, checked_addresses, system_lookup
from millstream.media.limits import MediaLimits

MAX_REDIRECTS = 3
READ_BYTES = 64 * 1024
_REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"user-agent": "millstream", "accept": "image/*, audio/*, video/*, */*;q=0.5", "accept-encoding": "identity"}


def fetch(url: str, limits: MediaLimits, lookup: Lookup = system_lookup) -> bytes:
    """The body of `url`. Raises `MediaRefused` with the reason."""
    deadline = time.monotonic() + limits.timeout
    for _ in range(MAX_REDIRECTS + 1):
        body, location = _get(url, limits, lookup, deadline)
        if location is None:
            return body
        url = urljoin(url, location)
    raise MediaRefused(f"a media URL redirects more than {MAX_REDIRECTS} times; send the final URL")


def _get(url: str, limits: MediaLimits, lookup: Lookup, deadline: float) -> tuple[bytes, str | None]:
    """The body, or the location of a redirect."""
    parts = _split_url(url)
    connection = _Connection(parts, limits, lookup, deadline)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers=_HEADERS)
        response = connection.getresponse()
        location = response.getheader("location")
        if response.status in _REDIRECT_STATUSES and location is not None:
            return b"", location
        if response.status != http.client.OK:
            raise MediaRefused(f"{_short(url)} answered {response.status} {response.reason}; expected 200")
        return _read(response, limits), None
    except TimeoutError as error:
        raise MediaRefused(f"{_short(url)} took longer than {limits.timeout:g} s (--media-timeout)") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise MediaRefused(f"{_short(url)} cannot be fetched: {error or type(error).__name__}") from error
    finally:
        connection.close_socket()


def _split_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise MediaRefused(f"{_short(url)} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise MediaRefused(f"{_short(url)} cannot be fetched: send a URL such as http://host/path or https://host/path")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise MediaRefused(f"{_short(url)} has characters that a URL must not contain: encode them as %XX")
    return parts


class _Connection(http.client.HTTPConnection):
    """Connects to checked addresses only, and never waits past the deadline."""

    def __init__(self, parts: SplitResult, limits: MediaLimits, lookup: Lookup, deadline: float) -> None:
        secure = parts.scheme == "https"
        super().__init__(parts.hostname or "", parts.port or (443 if secure else 80))
        self._secure = secure
        self._allow_private = limits.allow_private
        self._lookup = lookup
        self._deadline = deadline
        self._raw: socket.socket | None = None

    def connect(self) -> None:
        self._raw = self._open_socket()
        if self._secure:
            self._raw = _tls().wrap_socket(self._raw, server_hostname=self.host)
        self.sock = _DeadlineSocket(self._raw, self._remaining)

    def close_socket(self) -> None:
        if self._raw is not None:
            self._raw.close()

    def _open_socket(self) -> socket.socket:
        failure = OSError("the host has no address")
        addresses = checked_addresses(
            self.host, self.port, allow_private=self._allow_private, lookup=self._lookup, seconds=self._remaining()
        )
        for address in addresses:
            try:
                return socket.create_connection((address, self.port), timeout=self._remaining())
            except TimeoutError:
                raise
            except OSError as error:
                failure = error
        raise failure

    def _remaining(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        return remaining


class _DeadlineSocket(io.RawIOBase):
    """A socket for `http.client` whose reads and writes share one deadline: with a timeout per read, a host that sends
    a byte at a time could go on for ever. `_Connection.close_socket` closes it."""

    def __init__(self, inner: socket.socket, remaining: Callable[[], float]) -> None:
        self._inner = inner
        self._remaining = remaining

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        self._inner.settimeout(self._remaining())
        return self._inner.recv_into(buffer)

    def sendall(self, data: Buffer) -> None:
        self._inner.settimeout(self._remaining())
        self._inner.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def close(self) -> None:
        """Does nothing: `http.client` closes the socket while the response is still being read from its buffer."""


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _read(response: http.client.HTTPResponse, limits: MediaLimits) -> bytes:
    if response.length is not None and response.length > limits.file_bytes:
        raise too_large(response.length, limits)
    pieces: list[bytes] = []
    received = 0
    while True:
        piece = response.read1(READ_BYTES)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        received += len(piece)
        if received > limits.file_bytes:
            raise too_large(received, limits)


def too_large(size: int, limits: MediaLimits) -> MediaRefused:
    return MediaRefused(
        f"a media file has {size} bytes or more; this server takes at most {limits.file_bytes} ({limits.bytes_option})"
    )


def _short(url: str) -> str:
    return repr(url if len(url) <= 100 else url[:97] + "...")
