"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import read_body
from millstream.api.error_docs import SERVICE
from millstream.api.openai import docs, examples
from millstream.api.openai.render_calls import FunctionCalls, ToolCalls
from millstream.api.openai.render_chat import ChatRenderer
from millstream.api.openai.requests import chat_request
from millstream.api.openai.response_schema import ChatCompletion, ChatCompletionChunk
from millstream.api.openai.schema import ChatRequest
from millstream.api.openapi import documented
from millstream.api.render import RendererFactory
from millstream.api.response import Responder

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
    async def chat_completions(request: Request) -> Response:
        parsed, generation = await read_body(request, chat_request)
        return responder.respond(generation, _renderer(parsed), stream=parsed.stream)

    return router


def _renderer(request: ChatRequest) -> RendererFactory:
    """The factory does not hold the request, which may have megabytes of media."""
    legacy = request.functions is not None and request.functions.tools
    return partial(
        ChatRenderer,
        include_usage=request.stream_options.include_usage,
        logprobs=request.logprobs,
        include_reasoning=request.reasoning_options().shown is not False,
        calls=FunctionCalls() if legacy else ToolCalls(request.tools.custom if request.tools else frozenset()),
    )
