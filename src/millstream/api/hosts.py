"""Checks the Host header, against DNS rebinding: a page whose host name was rebound to this machine's address still
sends its own name."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.api.addresses import is_loopback_address, is_loopback_name
from millstream.errors import BadRequest, HostNotAllowed

ANY = "*"
MAX_ACCEPTED = 100
"""Good headers that are remembered. They differ by their port at least, so a client could make up many."""
_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([^\[\]:/?#@\s]{1,253}))(?::[0-9]{0,5})?")


def names_to_check(address: str, allowed: Sequence[str]) -> frozenset[str] | None:
    """Returns the host names, besides loopback names, that a server bound to `address` accepts. None accepts any."""
    if ANY in allowed or not (allowed or is_loopback_address(address)):
        return None
    return frozenset({address.lower(), *(name.lower().strip("[]").rstrip(".") for name in allowed)})


class KnownHosts:
    """Requires one Host header per request, or none in HTTP/1.0. With `names`, the host must be one of them or a
    loopback name.

    It also refuses scopes other than HTTP, WebSocket and lifespan, so a new kind of route is closed by default.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] | None) -> None:
        self._app = app
        self._names = None if names is None else frozenset(names)
        self._accepted: set[bytes] = set()
        """Headers that were found good: most clients send the same."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] in ("http", "websocket"):
            self._check(scope)
        elif scope["type"] != "lifespan":
            raise HostNotAllowed("This server speaks HTTP and WebSocket only.")
        return self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        sent = [value for name, value in scope["headers"] if name == b"host"]
        if not sent and scope["http_version"] == "1.0":
            return
        if len(sent) != 1:
            raise BadRequest(f"A request must have one Host header; this one has {len(sent)}.")
        if self._names is None:
            return
        if sent[0] not in self._accepted:
            self._check_name(sent[0].decode("latin-1").strip().lower())
            if len(self._accepted) < MAX_ACCEPTED:
                self._accepted.add(sent[0])

    def _check_name(self, host: str) -> None:
        match = _HOST.fullmatch(host)
        name = (match[1] or match[2].rstrip(".")) if match else ""
        if not is_loopback_name(name) and name not in (self._names or ()):
            raise HostNotAllowed(
                f"This server does not accept the host {host[:100]!r}. If that is its name, start it with "
                f"--allowed-host {name[:100] if name else 'NAME'}."
            )
