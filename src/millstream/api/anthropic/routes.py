"""POST /v1/messages and /v1/messages/count_tokens; GET /api/hello."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.anthropic import examples
from millstream.api.anthropic.docs import ERRORS, EVENT_STREAM, STATUSES
from millstream.api.anthropic.render import MessageRenderer
from millstream.api.anthropic.requests import count_request, messages_request
from millstream.api.anthropic.response_schema import AnthropicHello, AnthropicMessage, AnthropicTokenCount
from millstream.api.anthropic.schema import CountRequest, MessagesRequest
from millstream.api.auth import owner_of
from millstream.api.body import read_body
from millstream.api.disconnect import DEPARTURE, WhileConnected
from millstream.api.error_docs import ANY_REQUEST
from millstream.api.errors import json_response
from millstream.api.hosted_tools import HostedTools
from millstream.api.openapi import documented
from millstream.api.response import Responder

_MESSAGES = documented(
    AnthropicMessage,
    "The message: whole, or with `stream` as server-sent events.",
    errors=ERRORS.references(STATUSES),
    body=MessagesRequest,
    examples=examples.MESSAGES,
    stream=EVENT_STREAM,
)
_COUNT = documented(
    AnthropicTokenCount,
    "The number of tokens.",
    errors=ERRORS.references(STATUSES),
    body=CountRequest,
    examples=examples.COUNT,
)
_HELLO = documented(AnthropicHello, "The server is up.", errors=ERRORS.references(ANY_REQUEST))


def routes(responder: Responder) -> APIRouter:
    router = APIRouter(tags=["messages"], default_response_class=Response)
    generation = responder.services.generation
    hosted = HostedTools("Anthropic")

    @router.post("/v1/messages", summary="Continue a conversation (Anthropic)", openapi_extra=_MESSAGES)
    async def messages(request: Request) -> Response:
        seal = responder.services.seal.of(owner_of(request.scope))
        parsed = await read_body(request, partial(messages_request, seal=seal))
        hosted.tell(parsed.left_out)
        renderer = partial(MessageRenderer, seal=seal, options=parsed.options)
        return responder.respond(parsed.generation, renderer, stream=parsed.stream)

    @router.post("/v1/messages/count_tokens", summary="Count the tokens of a conversation", openapi_extra=_COUNT)
    async def count_tokens(request: Request) -> Response:
        seal = responder.services.seal.of(owner_of(request.scope))
        parsed = await read_body(request, partial(count_request, seal=seal))
        async with WhileConnected(request.receive, request.scope.get(DEPARTURE)):
            count = await generation.count_tokens(parsed)
        return json_response({"input_tokens": count})

    @router.get("/api/hello", summary="A sign of life, which Claude Code asks for", openapi_extra=_HELLO)
    async def hello() -> Response:
        return json_response({"message": "hello"})

    return router
