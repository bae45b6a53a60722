"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import read_body
from millstream.api.error_docs import SERVICE
from millstream.api.openai import examples
from millstream.api.openai.render_chat import ChatRenderer
from millstream.api.openai.requests import chat_request
from millstream.api.openai.response_schema import ChatCompletion, ChatCompletionChunk
from millstream.api.openai.schema import ChatRequest
from millstream.api.openapi import documented
from millstream.api.response import GenerationResponse, respond
from millstream.service.ports import GenerationService

_DOCS = documented(
    ChatCompletion,
    "The answer: whole, or with `stream` as server-sent events.",
    errors=SERVICE,
    body=ChatRequest,
    examples=examples.CHAT,
    events=ChatCompletionChunk,
)


def routes(service: GenerationService, *, ping_seconds: float, write_timeout: float) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["text"], default_response_class=Response)

    @router.post("/chat/completions", summary="Continue a conversation", openapi_extra=_DOCS)
    async def chat_completions(request: Request) -> GenerationResponse:
        asked, generation = await read_body(request, chat_request)
        usage = asked.stream_options.include_usage
        renderer = partial(ChatRenderer, include_usage=usage, logprobs=asked.logprobs)
        return respond(
            service,
            generation,
            renderer,
            stream=asked.stream,
            ping_seconds=ping_seconds,
            write_timeout=write_timeout,
        )

    return router
