"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request

from millstream.api.answer import Answer, answer
from millstream.api.body import read_object
from millstream.api.docs import documented
from millstream.api.openai.render_chat import ChatRenderer
from millstream.api.openai.requests import chat_generation, read
from millstream.api.openai.schema import ChatRequest
from millstream.service.ports import TextService


def routes(service: TextService, *, ping_seconds: float, write_timeout: float) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["text"])

    @router.post("/chat/completions", summary="Continue a conversation", openapi_extra=documented(ChatRequest))
    async def chat_completions(request: Request) -> Answer:
        asked = read(ChatRequest, await read_object(request))
        usage = asked.stream_options.include_usage
        renderer = partial(ChatRenderer, include_usage=usage, logprobs=asked.logprobs)
        return answer(
            service,
            chat_generation(asked),
            renderer,
            stream=asked.stream,
            ping_seconds=ping_seconds,
            write_timeout=write_timeout,
        )

    return router
