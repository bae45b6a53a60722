"""Paths that clients get slightly wrong: without `/v1`, with a slash at the end, or with two slashes in a row.

This happens before anything looks at the path, so API keys, admin routes and dialects see the path that is served.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from functools import lru_cache
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Receive, Scope, Send

WITHOUT_VERSION = re.compile(
    rb"/(?:chat/completions|completions|models|messages|responses|embeddings|realtime)(?:/.*)?", re.DOTALL
)
"""Paths that mean the same below `/v1`: for clients whose base URL lacks it."""
_SLASHES = re.compile(rb"//+")


@lru_cache(256)
def normal_path(raw: bytes) -> bytes:
    """Returns the path that is meant. A percent-encoded slash is part of a name, and stays."""
    path = _SLASHES.sub(b"/", raw)
    if len(path) > 1:
        path = path.removesuffix(b"/")
    return b"/v1" + path if WITHOUT_VERSION.fullmatch(path) else path


class NormalPaths:
    """Serves a request at the path that is meant."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] in ("http", "websocket"):
            raw = scope.get("raw_path") or quote(scope["path"]).encode("ascii")
            if (path := normal_path(raw)) != raw:
                scope = {**scope, "raw_path": path, "path": unquote(path.decode("latin-1"))}
        return self._app(scope, receive, send)
