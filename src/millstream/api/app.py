"""The ASGI application: routes and middleware around a service."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from millstream import __version__
from millstream.api import system
from millstream.api.body import BodyLimit
from millstream.api.docs import DocumentedApp
from millstream.api.edge import Edge
from millstream.api.errors import on_http_exception
from millstream.api.openai import chat, completions, models
from millstream.api.openai.schema import ChatRequest, CompletionRequest, StreamOptions
from millstream.service.ports import TextService

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

PING_SECONDS = 15.0


def create_app(
    service: TextService, *, body_limit: int, lifespan: Lifespan | None = None, ping_seconds: float = PING_SECONDS
) -> FastAPI:
    """`lifespan` is FastAPI's. A stream that is silent for `ping_seconds` gets a comment, to stay open."""
    app = DocumentedApp(
        title="Millstream",
        version=__version__,
        description="An inference server for MLX that speaks OpenAI's API.",
        lifespan=lifespan,
        redirect_slashes=False,
        responses={"default": {"description": "An error, in OpenAI's shape"}},
        bodies=(ChatRequest, CompletionRequest, StreamOptions),
    )
    app.include_router(chat.routes(service, ping_seconds=ping_seconds))
    app.include_router(completions.routes(service, ping_seconds=ping_seconds))
    app.include_router(models.routes(service))
    app.include_router(system.routes(service))
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_middleware(BodyLimit, limit=body_limit)
    app.add_middleware(Edge)  # added last, so outermost: it also catches what the others raise
    return app
