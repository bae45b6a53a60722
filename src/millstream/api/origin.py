"""Checks the Origin header: a browser lets any web page send requests to a server on this machine, although the page
cannot read the response."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.errors import Forbidden

_READING = ("GET", "HEAD", "OPTIONS")


class KnownOrigins:
    """For a server without keys: refuses requests from web pages of unknown origins, unless they only read. Clients
    that are no web pages send no Origin and pass.

    Without it, any page that a person visits could load and unload models, or keep the machine busy.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = {origin.rstrip("/").lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _READING:
            self._check(dict(scope["headers"]))
        await self._app(scope, receive, send)

    def _check(self, headers: dict[bytes, bytes]) -> None:
        sent = headers.get(b"origin")
        if sent is None:
            return
        origin = sent.decode("latin-1").strip().lower()
        own = headers.get(b"host", b"").decode("latin-1").strip().lower()
        if origin in self._origins or _host_and_port(origin) == own:
            return
        raise Forbidden(
            f"Web pages of {origin[:200]!r} may not call this server. If the page is yours, start the server with "
            "--cors-origin and that origin, or with --api-key."
        )


def _host_and_port(origin: str) -> str | None:
    """Returns host and port as in a `Host` header. None if the origin is not that of a web server, such as `null`."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc if parts.scheme in ("http", "https") and parts.netloc else None
