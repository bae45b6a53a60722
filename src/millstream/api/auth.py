"""API key authentication: without a valid key, only /health and the web pages are open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.errors import Unauthorized

OPEN_PATH = "/health"

OWNER = "millstream.owner"
"""Key of the ASGI scope: see `owner_of`."""

KEY_PROTOCOL = b"openai-insecure-api-key."
"""Begin of a WebSocket subprotocol: browsers can send a key in no other way."""

_HINT = "Send the key in a header: 'Authorization: Bearer KEY' or 'x-api-key: KEY'."


class ApiKeys:
    """Refuses requests without one of the keys. Runs before any code that reads a body.

    It also refuses scopes other than HTTP and lifespan, so a new kind of route is closed by default. `is_public` tells
    of a request whether it is open to everyone, besides /health.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], is_public: Callable[[Scope], bool] = lambda _: False) -> None:
        self._app = app
        self._is_public = is_public
        self._keys = [key.encode("utf-8", "surrogateescape") for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not _is_open(scope) and not self._is_public(scope):
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        sent = list(sent_keys(scope))
        valid = next((key for key in sent if self._is_key(key)), None)
        if valid is not None:
            scope[OWNER] = hashlib.sha256(b"millstream owner\0" + valid).hexdigest()
            return
        if sent:
            raise Unauthorized(f"The API key is not valid. {_HINT}")
        if any(name == b"authorization" for name, _ in scope["headers"]):
            raise Unauthorized(f"The Authorization header has no 'Bearer KEY'. {_HINT}")
        raise Unauthorized(f"This server requires an API key, and the request has none. {_HINT}")

    def _is_key(self, sent: bytes) -> bool:
        """Compares with every key, even after a match, so that the timing reveals nothing about the keys."""
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(sent, key)
        return found


def owner_of(scope: Scope) -> str:
    """Whose request this is: a hash of its API key, of the first one if it has two. "" on a server without keys, and
    where a request needs none. What a request leaves behind that has an id belongs to its owner alone."""
    owner: str = scope.get(OWNER, "")
    return owner


def _is_open(scope: Scope) -> bool:
    """True for /health and for CORS preflights: browsers send those without the headers of the request itself."""
    if scope["path"] == OPEN_PATH:
        return True
    names = {name for name, _ in scope["headers"]}
    return scope.get("method") == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names


def sent_keys(scope: Scope) -> Iterator[bytes]:
    """Yields the keys of all headers: OpenAI's clients always send Authorization, if need be with a made-up key."""
    for name, value in scope["headers"]:
        found = b""
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            found = key.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"x-api-key":
            found = value.strip()
        elif name == b"sec-websocket-protocol" and scope["type"] == "websocket":
            yield from _protocol_keys(value)
        if found:
            yield found


def _protocol_keys(value: bytes) -> Iterator[bytes]:
    for protocol in value.split(b","):
        if (protocol := protocol.strip()).startswith(KEY_PROTOCOL):
            yield protocol.removeprefix(KEY_PROTOCOL)
