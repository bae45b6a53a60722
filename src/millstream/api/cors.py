"""CORS: the headers that let a browser show a page the answers of this server.

Pages of allowed origins read everything. Others are refused (`origin.py`), and they may read that refusal, so that the
person who wrote the page learns the reason: it holds no secret.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.api.methods import METHODS
from millstream.api.origin import OriginPolicy
from millstream.api.reply import REPLY

EXPOSED = "retry-after, www-authenticate, x-request-id, request-id"
MAX_AGE = "600"
_ASKED_METHOD, _ASKED_HEADERS = "access-control-request-method", "access-control-request-headers"
_ASKED_PRIVATE = "access-control-request-private-network"


class Cors:
    """Responds to preflights, and adds CORS headers to responses. It stands around the edge: a page can read an error
    only if that carries these headers too."""

    def __init__(self, app: ASGIApp, policy: OriginPolicy) -> None:
        self._app = app
        self._policy = policy

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        if all(name != b"origin" for name, _ in scope["headers"]):  # not a browser
            if not self._policy.any:
                scope[REPLY].change_head(_vary)
            return self._app(scope, receive, send)
        headers = Headers(scope=scope)
        origin = headers["origin"]
        allowed = self._policy.allows(origin, headers.get("host", ""))
        # To an origin that is refused, every response is a refusal.
        readable = origin if allowed or self._policy.refuses else None
        if readable is not None and scope["method"] == "OPTIONS" and _ASKED_METHOD in headers:
            return self._preflight(readable, headers, allowed=allowed)(scope, receive, send)
        # A request for the methods of a path is not refused.
        shown = None if scope["method"] == "OPTIONS" and not allowed else readable
        scope[REPLY].change_head(lambda message: self._add(MutableHeaders(scope=message), shown))
        return self._app(scope, receive, send)

    def _preflight(self, origin: str, asked: Headers, *, allowed: bool) -> Response:
        response = Response(status_code=200)
        self._add(response.headers, origin)
        response.headers["access-control-allow-methods"] = ", ".join((*METHODS, "HEAD", "OPTIONS"))
        response.headers["access-control-max-age"] = MAX_AGE
        if _ASKED_HEADERS in asked:
            response.headers["access-control-allow-headers"] = asked[_ASKED_HEADERS]
        # Browsers ask this for public pages, which otherwise cannot reach a server on localhost. Where they ask, pages
        # of unknown sites do not even learn that there is a server.
        if allowed and _ASKED_PRIVATE in asked:
            response.headers["access-control-allow-private-network"] = "true"
        return response

    def _add(self, headers: MutableHeaders, origin: str | None) -> None:
        if origin is not None:
            headers["access-control-allow-origin"] = "*" if self._policy.any else origin
            headers["access-control-expose-headers"] = EXPOSED
        if not self._policy.any:
            headers.add_vary_header("Origin")


def _vary(message: Message) -> None:
    """The same for a client that is no browser, which is nearly every one."""
    if any(name.lower() == b"vary" for name, _ in message["headers"]):
        MutableHeaders(scope=message).add_vary_header("Origin")
    else:
        message["headers"].append((b"vary", b"Origin"))
