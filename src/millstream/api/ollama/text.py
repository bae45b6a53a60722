"""POST /api/chat and /api/generate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import read_body
from millstream.api.error_docs import SERVICE
from millstream.api.errors import json_response
from millstream.api.ollama import docs, examples
from millstream.api.ollama.names import find_model
from millstream.api.ollama.render import ChatLines, GenerateLines
from millstream.api.ollama.requests import chat_generation, chat_request, generate_request, prompt_generation
from millstream.api.ollama.response_schema import OllamaChat, OllamaChatLine, OllamaGenerated, OllamaGeneratedLine
from millstream.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from millstream.api.ollama.timing import Stopwatch, TimedService
from millstream.api.openapi import documented
from millstream.api.response import Responder
from millstream.errors import EngineGone
from millstream.model_facts import ModelCard
from millstream.service.ports import Services
from millstream.types import GenerationRequest

_CHAT = documented(
    OllamaChat,
    "The answer: as lines of JSON, or whole if `stream` is false.",
    errors=docs.ERRORS.references(SERVICE),
    body=OllamaChatRequest,
    examples=examples.CHAT,
    stream=docs.line_stream(OllamaChatLine),
)
_GENERATE = documented(
    OllamaGenerated,
    "The response: as lines of JSON, or whole if `stream` is false.",
    errors=docs.ERRORS.references(SERVICE),
    body=OllamaGenerateRequest,
    examples=examples.GENERATE,
    stream=docs.line_stream(OllamaGeneratedLine),
)

_Parsed = OllamaChatRequest | OllamaGenerateRequest


def routes(responder: Responder) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["ollama"], default_response_class=Response)
    services = responder.services

    @router.post("/chat", summary="Continue a conversation (Ollama)", openapi_extra=_CHAT)
    async def ollama_chat(request: Request) -> Response:
        watch = Stopwatch()
        parsed = await read_body(request, chat_request)
        card = find_model(services.models, parsed.model)
        renderer = partial(ChatLines, name=parsed.model, watch=watch)
        if not parsed.messages:
            return json_response(renderer(card.name).loaded(await _load(services, card, parsed)))
        return _respond(responder, parsed, chat_generation(parsed, card.name), renderer, watch)

    @router.post("/generate", summary="Respond to a prompt (Ollama)", openapi_extra=_GENERATE)
    async def ollama_generate(request: Request) -> Response:
        watch = Stopwatch()
        parsed = await read_body(request, generate_request)
        card = find_model(services.models, parsed.model)
        renderer = partial(GenerateLines, name=parsed.model, watch=watch)
        if not (parsed.prompt or parsed.suffix or parsed.images):
            return json_response(renderer(card.name).loaded(await _load(services, card, parsed)))
        return _respond(responder, parsed, prompt_generation(parsed, card.name), renderer, watch)

    return router


def _respond(
    responder: Responder,
    parsed: _Parsed,
    generation: GenerationRequest,
    renderer: partial[ChatLines] | partial[GenerateLines],
    watch: Stopwatch,
) -> Response:
    timed = TimedService(responder.services, watch, parsed.keep_alive)
    responder = replace(responder, services=replace(responder.services, generation=timed))
    return responder.respond(generation, renderer, stream=parsed.stream is not False)


async def _load(services: Services, card: ModelCard, parsed: _Parsed) -> str:
    """Loads the model, or unloads it once it is idle if `keep_alive` is 0. Returns the reason that the answer gives."""
    if parsed.keep_alive == 0:
        services.models.keep_loaded(card.name, 0)
        return "unload"
    if card.state == "failed":  # to try again is for operators
        raise EngineGone(f"the model {card.name!r} has failed: {card.error}", retry_after=None)
    await services.models.load(card.name)
    if parsed.keep_alive is not None:
        services.models.keep_loaded(card.name, parsed.keep_alive)
    return "load"
