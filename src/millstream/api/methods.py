"""Methods of a path: adds `OPTIONS` to every route, and `HEAD` to every route with `GET`."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def allowed_methods(routes: Sequence[BaseRoute], scope: Scope) -> list[str]:
    """Returns the methods of all routes at this path, as the `Allow` header lists them. Empty for an unknown path."""
    methods = {
        method
        for method in METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    }
    if "GET" in methods:
        methods.add("HEAD")
    return sorted(methods | {"OPTIONS"}) if methods else []


class Methods:
    """Responds to `OPTIONS` itself, and passes `HEAD` on as `GET`: the server omits the body.

    The CORS middleware, further out, responds to preflights of allowed origins.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or scope["method"] not in ("HEAD", "OPTIONS"):
            return self._app(scope, receive, send)
        methods = allowed_methods(self._routes, scope)
        if scope["method"] == "OPTIONS" and methods:
            return Response(status_code=204, headers={"allow": ", ".join(methods)})(scope, receive, send)
        return self._app({**scope, "method": "GET"} if "GET" in methods else scope, receive, send)
