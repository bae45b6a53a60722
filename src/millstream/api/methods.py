"""Which methods a path takes: `OPTIONS` for every route, and `HEAD` wherever there is `GET`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def allowed_methods(routes: Sequence[BaseRoute], scope: Scope) -> list[str]:
    """What all routes of this path take together, as the `Allow` header lists it. Empty: there is no such path."""
    methods = {
        method
        for method in METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    }
    if "GET" in methods:
        methods.add("HEAD")
    return sorted(methods | {"OPTIONS"}) if methods else []


class Methods:
    """Answers `OPTIONS` itself, and has `HEAD` served as `GET`: the server leaves the body out.

    Preflights of pages that may call are answered further out, by the CORS middleware.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        methods = allowed_methods(self._routes, scope)
        if scope["method"] == "OPTIONS" and methods:
            await Response(status_code=204, headers={"allow": ", ".join(methods)})(scope, receive, send)
        else:
            await self._app({**scope, "method": "GET"} if "GET" in methods else scope, receive, send)
