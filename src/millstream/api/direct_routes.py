"""Calls the endpoint of a plain route at once: FastAPI's search for a route and its dependencies cost more time than a
request takes to be parsed."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """Stands right before the router, which gets all other requests."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._endpoints = direct_endpoints(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and not scope.get("root_path"):
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def direct_endpoints(routes: Iterable[BaseRoute]) -> Mapping[tuple[str, str], Endpoint]:
    """The endpoints by method and path that need nothing but the request and return a response, at paths without
    variables. Where several routes share a method and a path, the router has to choose."""
    found: dict[tuple[str, str], Endpoint] = {}
    count: Counter[tuple[str, str]] = Counter()
    for route in routes:
        if not isinstance(route, Route):
            continue
        places = [(method, route.path) for method in route.methods or ()]
        count.update(places)
        if isinstance(route, APIRoute) and "{" not in route.path and _is_plain(route):
            found.update(dict.fromkeys(places, route.endpoint))
    return {place: endpoint for place, endpoint in found.items() if count[place] == 1}


def _is_plain(route: APIRoute) -> bool:
    signature = inspect.signature(route.endpoint, eval_str=True)
    kinds = [parameter.annotation for parameter in signature.parameters.values()]
    returns = signature.return_annotation
    is_response = isinstance(returns, type) and issubclass(returns, Response)
    plain = type(route).matches is APIRoute.matches and not route.dependencies
    return plain and is_response and kinds == [Request] and inspect.iscoroutinefunction(route.endpoint)
