"""The ASGI application: routes and middleware around a service."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from millstream import __version__
from millstream.api import system
from millstream.api.auth import ApiKeys
from millstream.api.body import BodyLimit
from millstream.api.docs import DocumentedApp
from millstream.api.edge import Edge
from millstream.api.errors import on_http_exception
from millstream.api.openai import chat, completions, models
from millstream.api.openai.schema import ChatRequest, CompletionRequest, StreamOptions
from millstream.api.origin import KnownOrigins
from millstream.service.ports import TextService

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

PING_SECONDS = 15.0
WRITE_TIMEOUT = 60.0


def create_app(
    service: TextService,
    *,
    body_limit: int,
    lifespan: Lifespan | None = None,
    ping_seconds: float = PING_SECONDS,
    write_timeout: float = WRITE_TIMEOUT,
    api_keys: tuple[str, ...] = (),
    cors_origins: tuple[str, ...] = (),
) -> FastAPI:
    """`lifespan` is FastAPI's. A stream that is silent for `ping_seconds` gets a comment, to stay open.
    A client that takes nothing for `write_timeout` seconds is left; 0 for never.

    Without `api_keys` the API is open, but not for web pages of origins other than its own and `cors_origins`.
    """
    app = DocumentedApp(
        title="Millstream",
        version=__version__,
        description="An inference server for MLX that speaks OpenAI's API.",
        lifespan=lifespan,
        redirect_slashes=False,
        responses={"default": {"description": "An error, in OpenAI's shape"}},
        bodies=(ChatRequest, CompletionRequest, StreamOptions),
    )
    app.include_router(chat.routes(service, ping_seconds=ping_seconds, write_timeout=write_timeout))
    app.include_router(completions.routes(service, ping_seconds=ping_seconds, write_timeout=write_timeout))
    app.include_router(models.routes(service))
    app.include_router(system.routes(service))
    app.add_exception_handler(HTTPException, on_http_exception)
    _add_middleware(app, body_limit=body_limit, api_keys=api_keys, cors_origins=cors_origins)
    return app


def _add_middleware(app: FastAPI, *, body_limit: int, api_keys: tuple[str, ...], cors_origins: tuple[str, ...]) -> None:
    """What is added later stands further out."""
    app.add_middleware(BodyLimit, limit=body_limit)
    if api_keys:
        app.add_middleware(ApiKeys, keys=api_keys)
    elif "*" not in cors_origins:
        app.add_middleware(KnownOrigins, origins=cors_origins)
    app.add_middleware(Edge)  # it also catches what those within raise
    if cors_origins:  # around the edge: a page can read an error only if that, too, carries the headers
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("retry-after", "www-authenticate"),
            allow_private_network=True,  # else a public page that is allowed could not reach a server on localhost
        )
