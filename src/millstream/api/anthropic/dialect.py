"""Anthropic's dialect, as the app registers it."""

from __future__ import annotations

from fastapi import APIRouter

from millstream.api.anthropic import models
from millstream.api.anthropic import routes as messages
from millstream.api.anthropic.docs import ERRORS
from millstream.api.anthropic.errors import ERROR_FORMAT
from millstream.api.anthropic.response_schema import EVENTS, AnthropicHello, AnthropicMessage, AnthropicTokenCount
from millstream.api.anthropic.schema import CountRequest, MessagesRequest
from millstream.api.dialect import Dialect, DialectDocs
from millstream.api.response import Responder


def _routes(responder: Responder) -> tuple[APIRouter, ...]:
    return (messages.routes(responder),)


def _shared_routes(responder: Responder) -> tuple[APIRouter, ...]:
    return (models.routes(responder.services.models),)


ANTHROPIC = Dialect(
    name="anthropic",
    routes=_routes,
    shared_routes=_shared_routes,
    errors=ERROR_FORMAT,
    docs=DialectDocs(
        errors=ERRORS,
        bodies=(MessagesRequest, CountRequest),
        responses=(AnthropicMessage, *EVENTS, AnthropicTokenCount, AnthropicHello),
        tags=({"name": "messages", "description": "Anthropic's Messages API."},),
    ),
    paths=("/v1/messages", "/api/hello"),
    header=models.VERSION_HEADER,
)
