"""Pages of other sites: a browser lets them send to a server on this machine, although they cannot read the answer."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.errors import Forbidden

_READING = ("GET", "HEAD", "OPTIONS")


class KnownOrigins:
    """For a server without keys. What only reads may pass, and so may whoever is no page: those send no Origin.

    Else any page that a person visits could load and unload models here, or keep the machine busy.
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
        if origin in self._origins or _place(origin) == own:
            return
        raise Forbidden(
            f"A page of {origin[:200]!r} may not call this server. If it is yours, start the server with "
            "--cors-origin and that origin, or with --api-key."
        )


def _place(origin: str) -> str | None:
    """Host and port, as a browser writes them in `Host`. None for what is no page of a server, such as `null`."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc if parts.scheme in ("http", "https") and parts.netloc else None
