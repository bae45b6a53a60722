"""The ASGI application: the routes of all dialects, and the middleware around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Scope

from millstream import __version__
from millstream.api import server_state, server_state_schema, system, tool_servers
from millstream.api.admin import LocalAdmin
from millstream.api.anthropic.dialect import ANTHROPIC
from millstream.api.auth import ApiKeys
from millstream.api.background import BackgroundTasks
from millstream.api.body import BodyLimit
from millstream.api.cors import Cors
from millstream.api.dialect import Dialect, Dialects
from millstream.api.direct_routes import DirectRoutes
from millstream.api.edge import Edge
from millstream.api.hosts import KnownHosts
from millstream.api.methods import Methods
from millstream.api.ollama.dialect import OLLAMA
from millstream.api.openai.dialect import OPENAI
from millstream.api.openai.realtime.routes import PATH as REALTIME_PATH
from millstream.api.openai.realtime.routes import opens_session
from millstream.api.openapi import DocumentedApp
from millstream.api.origin import KnownOrigins, OriginPolicy
from millstream.api.pages.routes import is_public, page_routes
from millstream.api.paths import NormalPaths, normal_path
from millstream.api.request_id import RequestIds
from millstream.api.response import Responder
from millstream.api.routing_errors import routing_error_handler
from millstream.api.system_schema import About, Health, McpServerList
from millstream.service.ports import Services

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

DEFAULT_DIALECT = OPENAI
"""Answers requests that belong to no dialect, such as an unknown URL or bytes that are not HTTP."""
DIALECTS: tuple[Dialect, ...] = (DEFAULT_DIALECT, ANTHROPIC, OLLAMA)
"""All dialects that the server speaks, the default one first. Register new ones here."""

PING_SECONDS = 15.0
WRITE_TIMEOUT = 60.0

_DESCRIPTION = """An inference server for MLX that speaks OpenAI's and Anthropic's APIs.

Clients that send the header `anthropic-version` get `/v1/models` in Anthropic's shape.

Errors have the shape of the API that their route belongs to. An unknown path is a 404. A method that a path does not
accept is a 405, and its `Allow` header lists the methods that it accepts."""
_SYSTEM_TAG = {"name": "system", "description": "The server itself. These routes respond while every model is busy."}


def is_websocket(raw_path: bytes) -> bool:
    """True if WebSockets are served at this path. Anywhere else, a request for an upgrade is served as plain HTTP."""
    return normal_path(raw_path) == REALTIME_PATH.encode()


def create_app(
    services: Services,
    *,
    body_limit: int,
    lifespan: Lifespan | None = None,
    ping_seconds: float = PING_SECONDS,
    write_timeout: float = WRITE_TIMEOUT,
    api_keys: tuple[str, ...] = (),
    cors_origins: tuple[str, ...] = (),
    hosts: Iterable[str] | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    background: BackgroundTasks | None = None,
    upload_limit: int = 0,
) -> FastAPI:
    """`lifespan` is FastAPI's. A stream that is silent for `ping_seconds` gets a ping, to stay open.
    A client that reads nothing for `write_timeout` seconds is disconnected; 0 disables this.

    Without `api_keys` the API is open, but not to web pages of unknown origins (see `origin.py`; `cors_origins` adds
    some), and admin routes are for this machine only. With `hosts`, a request must name one of them or a loopback
    name. The first of the `dialects` is the default. `background` gets the work that outlives its request; who passes
    it closes it. `upload_limit`: bytes of an uploaded file; 0 for the same as `body_limit`.
    """
    table = Dialects(dialects)
    app = DocumentedApp(
        table,
        title="Millstream",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        responses=(About, Health, McpServerList, *server_state_schema.MODELS),
        tags=(_SYSTEM_TAG,),
        keyed=bool(api_keys),
    )
    responder = Responder(
        services, ping_seconds=ping_seconds, write_timeout=write_timeout, background=background or BackgroundTasks()
    )
    routers = table.routers(responder)
    routers.append(system.routes(services.models, services.problems, table.default.docs.errors))
    routers.append(server_state.routes(services.state, table.default.docs.errors))
    routers.append(tool_servers.routes(services.tool_servers, table.default.docs.errors))
    pages = page_routes()
    app.router.routes.extend(pages)
    for router in routers:
        app.include_router(router)
    routes = [*pages, *(route for router in routers for route in router.routes)]
    served = {route.path for route in routes if isinstance(route, Route)}
    app.add_exception_handler(HTTPException, routing_error_handler(table, served))
    limits = {
        "limit": body_limit,
        "upload_limit": upload_limit,
        "upload_paths": [path for dialect in dialects for path in dialect.upload_paths],
    }
    has_secret = opens_session(services.realtime)
    app.add_middleware(DirectRoutes, routes=routes)
    _add_middleware(
        app,
        table,
        body_limits=limits,
        api_keys=api_keys,
        needs_no_key=lambda scope: is_public(scope) or has_secret(scope),
        cors_origins=cors_origins,
        hosts=hosts,
    )
    return app


def _add_middleware(
    app: FastAPI,
    dialects: Dialects,
    *,
    body_limits: dict[str, Any],
    api_keys: tuple[str, ...],
    needs_no_key: Callable[[Scope], bool],
    cors_origins: tuple[str, ...],
    hosts: Iterable[str] | None,
) -> None:
    """Middleware that is added later wraps what was added before."""
    policy = OriginPolicy(cors_origins, keyed=bool(api_keys))
    app.add_middleware(Methods, routes=app.routes)
    app.add_middleware(BodyLimit, **body_limits)
    if api_keys:
        app.add_middleware(ApiKeys, keys=api_keys, is_public=needs_no_key)
    else:
        app.add_middleware(LocalAdmin, paths=[path for dialect in dialects.all for path in dialect.admin_paths])
        if policy.refuses:
            app.add_middleware(KnownOrigins, policy=policy)
    app.add_middleware(KnownHosts, names=hosts)
    app.add_middleware(Edge, dialects=dialects)  # also catches what the middleware above raises
    app.add_middleware(Cors, policy=policy)
    app.add_middleware(NormalPaths)
    app.add_middleware(RequestIds)
