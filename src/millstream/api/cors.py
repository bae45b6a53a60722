"""CORS: the headers that let a browser show a page the answers of this server.

Pages of allowed origins read everything. Others are refused (`origin.py`), and they may read that refusal, so that the
person who wrote the page learns the reason: it holds no secret.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.api.methods import METHODS
from millstream.api.origin import OriginPolicy

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if scope["type"] != "http" or (origin is None and self._policy.any):
            await self._app(scope, receive, send)
            return
        allowed = origin is not None and self._policy.allows(origin, headers.get("host", ""))
        # To an origin that is refused, every response is a refusal.
        readable = origin if allowed or self._policy.refuses else None
        if readable is not None and scope["method"] == "OPTIONS" and _ASKED_METHOD in headers:
            await self._preflight(readable, headers, allowed=allowed)(scope, receive, send)
            return
        # A request for the methods of a path is not refused.
        shown = None if scope["method"] == "OPTIONS" and not allowed else readable

        async def send_readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add(MutableHeaders(scope=message), shown)
            await send(message)

        await self._app(scope, receive, send_readable)

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
