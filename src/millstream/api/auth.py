"""API keys: who sends none of them gets no further than /health."""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.errors import Unauthorized

OPEN_PATH = "/health"

_HOW = "Send the key in a header: 'Authorization: Bearer KEY' or 'x-api-key: KEY'."


class ApiKeys:
    """Lets a request pass that carries one of the keys. Stands before anything that reads a body.

    What is neither HTTP nor the server's own start is refused too: a kind of route that comes later starts out closed.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode("utf-8", "surrogateescape") for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not _is_open(scope):
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        sent = list(_sent_keys(scope))
        if any(self._is_key(key) for key in sent):
            return
        if sent:
            raise Unauthorized(f"The API key is wrong. {_HOW}")
        if any(name == b"authorization" for name, _ in scope["headers"]):
            raise Unauthorized(f"The Authorization header holds no 'Bearer KEY'. {_HOW}")
        raise Unauthorized(f"This server wants an API key, and none was sent. {_HOW}")

    def _is_key(self, sent: bytes) -> bool:
        """Compares with every key, also after a match, so that the time taken tells nothing about the keys."""
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(sent, key)
        return found


def _is_open(scope: Scope) -> bool:
    """Browsers send preflights without the headers of the request that they ask about, so without a key."""
    if scope["path"] == OPEN_PATH:
        return True
    names = {name for name, _ in scope["headers"]}
    return scope.get("method") == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names


def _sent_keys(scope: Scope) -> Iterator[bytes]:
    """Keys in either header: OpenAI's clients always fill Authorization, if need be with something made up."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            found = key.strip() if scheme.lower() == b"bearer" else b""
        else:
            found = value.strip() if name == b"x-api-key" else b""
        if found:
            yield found
