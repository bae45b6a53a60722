"""Which web pages may call the server: a browser lets any page send requests to a server on this machine.

A browser adds an `Origin` header that the page cannot change, so the decision is what an attacker could send:

- The origins of installed programs (`app://`, `tauri://`, `vscode-webview://`, ...) are never those of a web site, so
  they are allowed. So is `file://`, which programs send; browsers send `null` for pages that were opened as a file.
- `null` can come from any web site, through a sandboxed frame: refused.
- Pages of other servers on this machine, and browser extensions, are someone's, but need not be the user's: allowed
  only by an option.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.api.addresses import is_loopback_name
from millstream.api.errors import printable
from millstream.errors import Forbidden

log = logging.getLogger(__name__)

ANY, LOOPBACK, NULL = "*", "loopback", "null"
APP_SCHEMES = frozenset({"app", "capacitor", "file", "ionic", "tauri", "vscode-file", "vscode-webview"})
APP_ORIGINS = frozenset({"http://tauri.localhost", "https://tauri.localhost"})
"""Tauri's on Windows, where a program cannot have a scheme of its own."""
LOGGED_ORIGINS = 100
"""Refused origins that are logged, each of them once."""


class OriginPolicy:
    """Decides by origin. `origins` are those of the user: origins, `loopback`, or `*`.

    With `keyed`, the server asks for a key, which no page has unless its user gave it one. Then no origin is refused,
    and without `origins` every page may read the answers.
    """

    def __init__(self, origins: Iterable[str] = (), *, keyed: bool = False) -> None:
        self._origins = frozenset(origin.rstrip("/").lower() if "://" in origin else origin for origin in origins)
        self.any = ANY in self._origins or (keyed and not self._origins)
        self.refuses = not keyed and not self.any

    def allows(self, origin: str, host: str) -> bool:
        """True if pages of this origin may call the server and read its answers. `host` is the `Host` header."""
        origin = origin.strip().lower()
        if self.any or origin in self._origins or origin in APP_ORIGINS:
            return True
        if origin.partition("://")[0] in APP_SCHEMES and "://" in origin:
            return True
        address = _address(origin)
        if address is None:
            return False
        return address == host.strip().lower() or (LOOPBACK in self._origins and _is_loopback(origin))

    def reason(self, origin: str) -> str:
        """Returns the message for a refused origin: who was refused, and which option allows it."""
        shown = printable(origin)
        if origin.strip().lower() == NULL:
            return (
                "Web pages without an origin (opened from a file, or sandboxed) may not call this server, since any "
                "site can send requests as such a page. Serve the page from an address such as http://localhost:3000 "
                "and start the server with --cors-origin and that address, or start it with --api-key."
            )
        if _is_loopback(origin):
            return (
                f"Web pages of {shown!r} may not call this server. If the page is yours, start the server with "
                f"--cors-origin {shown}, or --cors-origin {LOOPBACK} for all pages of this machine, or --api-key."
            )
        return (
            f"Web pages of {shown!r} may not call this server. If the page is yours, start the server with "
            "--cors-origin and that origin, or with --api-key."
        )


class KnownOrigins:
    """For a server without keys: refuses requests from web pages of unknown origins. Clients that are no web pages
    send no Origin and pass.

    Without it, any page that a person visits could load and unload models, or keep the machine busy.
    """

    def __init__(self, app: ASGIApp, policy: OriginPolicy) -> None:
        self._app = app
        self._policy = policy
        self._logged: set[str] = set()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # A browser asks no preflight for a WebSocket, so this check is the only one.
        checked = scope["type"] == "websocket" or (scope["type"] == "http" and scope["method"] != "OPTIONS")
        if checked and any(name == b"origin" for name, _ in scope["headers"]):
            headers = dict(scope["headers"])
            self._check(headers[b"origin"].decode("latin-1"), headers.get(b"host", b"").decode("latin-1"))
        return self._app(scope, receive, send)

    def _check(self, origin: str, host: str) -> None:
        if self._policy.allows(origin, host):
            return
        reason = self._policy.reason(origin)
        if origin not in self._logged and len(self._logged) < LOGGED_ORIGINS:
            self._logged.add(origin)
            log.warning("refused a web page: %s", reason)
        raise Forbidden(reason)


def _address(origin: str) -> str | None:
    """Returns host and port as in a `Host` header. None if the origin is not that of a web server, such as `null`."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc if parts.scheme in ("http", "https") and parts.netloc else None


def _is_loopback(origin: str) -> bool:
    try:
        parts = urlsplit(origin.strip().lower())
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and is_loopback_name((parts.hostname or "").rstrip("."))
