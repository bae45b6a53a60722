"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import read_body
from millstream.api.error_docs import SERVICE
from millstream.api.openai import docs, examples
from millstream.api.openai.render_completion import CompletionRenderer
from millstream.api.openai.requests import completion_request
from millstream.api.openai.response_schema import Completion, CompletionChunk
from millstream.api.openai.schema import CompletionRequest
from millstream.api.openapi import documented
from millstream.api.response import Responder

_DOCS = documented(
    Completion,
    "The completions: whole, or with `stream` as server-sent events.",
    errors=docs.ERRORS.references(SERVICE),
    body=CompletionRequest,
    examples=examples.COMPLETION,
    stream=docs.event_stream(CompletionChunk),
)


def routes(responder: Responder) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["text"], default_response_class=Response)

    @router.post("/completions", summary="Continue a text", openapi_extra=_DOCS)
    async def completions(request: Request) -> Response:
        parsed, generation = await read_body(request, completion_request)
        usage = parsed.stream_options.include_usage
        renderer = partial(CompletionRenderer, include_usage=usage, logprobs=parsed.logprobs)
        return responder.respond(generation, renderer, stream=parsed.stream)

    return router
