"""Routes of the pages: `/` for browsers, `/dashboard`, `/docs` and their files below `/page/`.

The pages are public, also where the API needs a key: they hold no data, and ask for the key themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from millstream.api.pages.assets import Asset, read_assets

Endpoint = Callable[[Request], Awaitable[Response]]

HOME = "/"
PAGES = {HOME: "index.html", "/dashboard": "dashboard.html", "/docs": "docs.html"}
"""The file of each page."""
ASSETS = "/page/"

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "font-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data: blob:",
    "media-src": "blob:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Of every response here. A page runs no script but the server's own files, and loads nothing from other hosts,
whatever a model wrote."""


class HtmlRoute(Route):
    """A route for clients that ask for HTML. Others get what the next route at this path has."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if accepts_html(scope) else (Match.NONE, {})


def page_routes() -> list[BaseRoute]:
    """Register these before the JSON at `/`. Pages whose file is missing are left out."""
    assets = read_assets()
    routes: list[BaseRoute] = []
    for path, name in PAGES.items():
        if name in assets:
            kind = HtmlRoute if path == HOME else Route
            routes.append(kind(path, _page(assets[name]), include_in_schema=False))
    routes.append(Route(ASSETS + "{name:path}", _asset(assets), include_in_schema=False))
    return routes


def is_public(scope: Scope) -> bool:
    """True for requests that get a page or a file of one. `/` as JSON is not among them."""
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return False
    path: str = scope["path"]
    return accepts_html(scope) if path == HOME else path in PAGES or path.startswith(ASSETS)


def accepts_html(scope: Scope) -> bool:
    """True if `Accept` names text/html. A mere `*/*` does not: curl and the clients of APIs send it."""
    ranges = Headers(scope=scope).get("accept", "").lower().split(",")
    return any(each.partition(";")[0].strip() == "text/html" for each in ranges)


def _page(asset: Asset) -> Endpoint:
    async def page(request: Request) -> Response:
        return _respond(request, asset, {"vary": "accept"} if request.url.path == HOME else {})

    return page


def _asset(assets: Mapping[str, Asset]) -> Endpoint:
    async def asset(request: Request) -> Response:
        found = assets.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return _respond(request, found, {})

    return asset


def _respond(request: Request, asset: Asset, more: Mapping[str, str]) -> Response:
    headers = {**HEADERS, "etag": asset.etag, **more}
    known = request.headers.get("if-none-match", "")
    if asset.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")) or known.strip() == "*":
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers={**headers, "content-type": asset.content_type})
