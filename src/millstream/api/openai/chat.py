"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import read_body
from millstream.api.error_docs import SERVICE
from millstream.api.openai import docs, examples
from millstream.api.openai.render_chat import ChatRenderer
from millstream.api.openai.requests import chat_request
from millstream.api.openai.response_schema import ChatCompletion, ChatCompletionChunk
from millstream.api.openai.schema import ChatRequest
from millstream.api.openapi import documented
from millstream.api.response import GenerationResponse, Responder

_DOCS = documented(
    ChatCompletion,
    "The completion: whole, or with `stream` as server-sent events.",
    errors=docs.ERRORS.references(SERVICE),
    body=ChatRequest,
    examples=examples.CHAT,
    stream=docs.event_stream(ChatCompletionChunk),
)


def routes(responder: Responder) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["text"], default_response_class=Response)

    @router.post("/chat/completions", summary="Continue a conversation", openapi_extra=_DOCS)
    async def chat_completions(request: Request) -> GenerationResponse:
        parsed, generation = await read_body(request, chat_request)
        usage = parsed.stream_options.include_usage
        renderer = partial(ChatRenderer, include_usage=usage, logprobs=parsed.logprobs)
        return responder.respond(generation, renderer, stream=parsed.stream)

    return router
