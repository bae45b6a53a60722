"""Admin routes: what changes the server itself is for those with a key, or on this machine."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.api.addresses import is_loopback_address
from millstream.errors import AdminNotAllowed

ADMIN = re.compile(r"/v1/models/.+/(?:load|unload|cache/clear)", re.DOTALL)
"""The paths. Whoever adds an admin route adds it here."""


def is_admin(scope: Scope) -> bool:
    return ADMIN.fullmatch(scope["path"]) is not None and scope["method"] not in ("GET", "HEAD", "OPTIONS")


class LocalAdmin:
    """For a server without keys: admin routes answer only to peers on this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_admin(scope) and not _is_local(scope):
            raise AdminNotAllowed(
                "Loading, unloading and clearing caches needs an API key, or a client on the server's own machine. "
                "Start the server with --api-key to allow it from elsewhere."
            )
        await self._app(scope, receive, send)


def _is_local(scope: Scope) -> bool:
    """A client without an address came through a Unix socket."""
    client = scope.get("client")
    return client is None or is_loopback_address(client[0])
