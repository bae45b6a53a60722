"""The ASGI application: routes and middleware around a service."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from millstream import __version__
from millstream.api import system
from millstream.api.admin import LocalAdmin
from millstream.api.auth import ApiKeys
from millstream.api.body import BodyLimit
from millstream.api.edge import Edge
from millstream.api.errors import on_http_exception
from millstream.api.hosts import KnownHosts
from millstream.api.methods import Methods
from millstream.api.openai import chat, completions, models
from millstream.api.openai.model_schema import ModelList
from millstream.api.openai.response_schema import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from millstream.api.openai.schema import ChatRequest, CompletionRequest
from millstream.api.openapi import DocumentedApp
from millstream.api.origin import KnownOrigins
from millstream.api.system_schema import About, Health
from millstream.service.ports import Services

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

PING_SECONDS = 15.0
WRITE_TIMEOUT = 60.0

_DESCRIPTION = """An inference server for MLX that speaks OpenAI's API.

Errors have OpenAI's shape on every route. An unknown path is a 404; a method that a path does not take is a 405, and
its `Allow` header names those that it does."""
_TAGS = [
    {"name": "text", "description": "Answers of a model, whole or streamed."},
    {"name": "models", "description": "What is served; load and unload it."},
    {"name": "system", "description": "The server itself. These answer while every model is busy."},
]


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
) -> FastAPI:
    """`lifespan` is FastAPI's. A stream that is silent for `ping_seconds` gets a comment, to stay open.
    A client that takes nothing for `write_timeout` seconds is left; 0 for never.

    Without `api_keys` the API is open, but not for web pages of origins other than its own and `cors_origins`, and
    admin routes are for this machine only. With `hosts`, a request must be for one of them or for a loopback name.
    """
    app = DocumentedApp(
        title="Millstream",
        version=__version__,
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        lifespan=lifespan,
        redirect_slashes=False,
        bodies=(ChatRequest, CompletionRequest),
        answers=(ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, ModelList, About, Health),
        keyed=bool(api_keys),
    )
    app.include_router(chat.routes(services.generation, ping_seconds=ping_seconds, write_timeout=write_timeout))
    app.include_router(completions.routes(services.generation, ping_seconds=ping_seconds, write_timeout=write_timeout))
    app.include_router(models.routes(services.models))
    app.include_router(system.routes(services.models))
    app.add_exception_handler(HTTPException, on_http_exception)
    _add_middleware(app, body_limit=body_limit, api_keys=api_keys, cors_origins=cors_origins, hosts=hosts)
    return app


def _add_middleware(
    app: FastAPI,
    *,
    body_limit: int,
    api_keys: tuple[str, ...],
    cors_origins: tuple[str, ...],
    hosts: Iterable[str] | None,
) -> None:
    """What is added later stands further out."""
    app.add_middleware(Methods, routes=app.routes)
    app.add_middleware(BodyLimit, limit=body_limit)
    if api_keys:
        app.add_middleware(ApiKeys, keys=api_keys)
    else:
        app.add_middleware(LocalAdmin)
        if "*" not in cors_origins:
            app.add_middleware(KnownOrigins, origins=cors_origins)
    app.add_middleware(KnownHosts, names=hosts)
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
