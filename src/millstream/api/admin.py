"""Admin routes change the server itself. Without API keys, only clients on this machine may use them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.api.addresses import is_loopback_address
from millstream.errors import AdminNotAllowed

_READING = ("GET", "HEAD", "OPTIONS")


class LocalAdmin:
    """For a server without keys: refuses admin routes to clients on other machines. `paths` are the patterns of whole
    paths of admin routes."""

    def __init__(self, app: ASGIApp, paths: Sequence[re.Pattern[str]]) -> None:
        self._app = app
        self._paths = tuple(paths)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and self._is_admin(scope) and not _is_local(scope):
            raise AdminNotAllowed(
                "Loading, unloading and clearing caches needs an API key, or a client on the server's own machine. "
                "Start the server with --api-key to allow it from elsewhere."
            )
        return self._app(scope, receive, send)

    def _is_admin(self, scope: Scope) -> bool:
        return scope["method"] not in _READING and any(path.fullmatch(scope["path"]) for path in self._paths)


def _is_local(scope: Scope) -> bool:
    """A client without an address came through a Unix socket."""
    client = scope.get("client")
    return client is None or is_loopback_address(client[0])
