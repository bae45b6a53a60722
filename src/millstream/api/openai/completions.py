"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request

from millstream.api.answer import Answer, answer
from millstream.api.body import read_object
from millstream.api.docs import documented
from millstream.api.openai.render_completion import CompletionRenderer
from millstream.api.openai.requests import completion_generation, read
from millstream.api.openai.schema import CompletionRequest
from millstream.service.ports import TextService


def routes(service: TextService, *, ping_seconds: float, write_timeout: float) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["text"])

    @router.post("/completions", summary="Continue a text", openapi_extra=documented(CompletionRequest))
    async def completions(request: Request) -> Answer:
        asked = read(CompletionRequest, await read_object(request))
        usage = asked.stream_options.include_usage
        renderer = partial(CompletionRenderer, include_usage=usage, logprobs=asked.logprobs)
        return answer(
            service,
            completion_generation(asked),
            renderer,
            stream=asked.stream,
            ping_seconds=ping_seconds,
            write_timeout=write_timeout,
        )

    return router
