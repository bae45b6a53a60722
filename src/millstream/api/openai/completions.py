"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import read_body
from millstream.api.error_docs import SERVICE
from millstream.api.openai import examples
from millstream.api.openai.render_completion import CompletionRenderer
from millstream.api.openai.requests import completion_request
from millstream.api.openai.response_schema import Completion, CompletionChunk
from millstream.api.openai.schema import CompletionRequest
from millstream.api.openapi import documented
from millstream.api.response import GenerationResponse, respond
from millstream.service.ports import GenerationService

_DOCS = documented(
    Completion,
    "The continuations: whole, or with `stream` as server-sent events.",
    errors=SERVICE,
    body=CompletionRequest,
    examples=examples.COMPLETION,
    events=CompletionChunk,
)


def routes(service: GenerationService, *, ping_seconds: float, write_timeout: float) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["text"], default_response_class=Response)

    @router.post("/completions", summary="Continue a text", openapi_extra=_DOCS)
    async def completions(request: Request) -> GenerationResponse:
        asked, generation = await read_body(request, completion_request)
        usage = asked.stream_options.include_usage
        renderer = partial(CompletionRenderer, include_usage=usage, logprobs=asked.logprobs)
        return respond(
            service,
            generation,
            renderer,
            stream=asked.stream,
            ping_seconds=ping_seconds,
            write_timeout=write_timeout,
        )

    return router
