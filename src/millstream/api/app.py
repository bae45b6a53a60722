"""The ASGI application: the routes of all dialects, and the middleware around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from millstream import __version__
from millstream.api import system
from millstream.api.admin import LocalAdmin
from millstream.api.auth import ApiKeys
from millstream.api.body import BodyLimit
from millstream.api.dialect import Dialect, Dialects
from millstream.api.edge import Edge
from millstream.api.hosts import KnownHosts
from millstream.api.methods import Methods
from millstream.api.openai.dialect import OPENAI
from millstream.api.openapi import DocumentedApp
from millstream.api.origin import KnownOrigins
from millstream.api.response import Responder
from millstream.api.routing_errors import routing_error_handler
from millstream.api.system_schema import About, Health
from millstream.service.ports import Services

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

DEFAULT_DIALECT = OPENAI
"""Answers requests that belong to no dialect, such as an unknown URL or bytes that are not HTTP."""
DIALECTS: tuple[Dialect, ...] = (DEFAULT_DIALECT,)
"""All dialects that the server speaks, the default one first. Register new ones here."""

PING_SECONDS = 15.0
WRITE_TIMEOUT = 60.0

_DESCRIPTION = """An inference server for MLX that speaks OpenAI's API.

Errors have the shape of the API that their route belongs to. An unknown path is a 404. A method that a path does not
accept is a 405, and its `Allow` header lists the methods that it accepts."""
_SYSTEM_TAG = {"name": "system", "description": "The server itself. These routes respond while every model is busy."}


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
) -> FastAPI:
    """`lifespan` is FastAPI's. A stream that is silent for `ping_seconds` gets a ping, to stay open.
    A client that reads nothing for `write_timeout` seconds is disconnected; 0 disables this.

    Without `api_keys` the API is open, but not to web pages of origins other than its own and `cors_origins`, and
    admin routes are for this machine only. With `hosts`, a request must name one of them or a loopback name. The first
    of the `dialects` is the default.
    """
    table = Dialects(dialects)
    app = DocumentedApp(
        table,
        title="Millstream",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        responses=(About, Health),
        tags=(_SYSTEM_TAG,),
        keyed=bool(api_keys),
    )
    responder = Responder(services, ping_seconds=ping_seconds, write_timeout=write_timeout)
    for dialect in table.in_routing_order():
        for router in dialect.routes(responder):
            app.include_router(router)
    app.include_router(system.routes(services.models, table.default.docs.errors))
    app.add_exception_handler(HTTPException, routing_error_handler(table))
    _add_middleware(app, table, body_limit=body_limit, api_keys=api_keys, cors_origins=cors_origins, hosts=hosts)
    return app


def _add_middleware(
    app: FastAPI,
    dialects: Dialects,
    *,
    body_limit: int,
    api_keys: tuple[str, ...],
    cors_origins: tuple[str, ...],
    hosts: Iterable[str] | None,
) -> None:
    """Middleware that is added later wraps what was added before."""
    app.add_middleware(Methods, routes=app.routes)
    app.add_middleware(BodyLimit, limit=body_limit)
    if api_keys:
        app.add_middleware(ApiKeys, keys=api_keys)
    else:
        app.add_middleware(LocalAdmin, paths=[path for dialect in dialects.all for path in dialect.admin_paths])
        if "*" not in cors_origins:
            app.add_middleware(KnownOrigins, origins=cors_origins)
    app.add_middleware(KnownHosts, names=hosts)
    app.add_middleware(Edge, dialects=dialects)  # also catches what the middleware above raises
    if cors_origins:  # around the edge: a page can read an error only if it carries these headers too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("retry-after", "www-authenticate"),
            allow_private_network=True,  # otherwise an allowed public page could not reach a server on localhost
        )
