"""POST /api/embed, and its older form /api/embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import APIRouter, Request
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.responses import Response

from millstream.api.body import read_body
from millstream.api.connected import ComputedResponse
from millstream.api.error_docs import SERVICE
from millstream.api.numbers import Whole
from millstream.api.ollama import docs
from millstream.api.ollama.names import find_model
from millstream.api.ollama.requests import named_request
from millstream.api.ollama.schema import KeepAlive, OllamaModelRequest
from millstream.api.ollama.timing import Stopwatch
from millstream.api.openapi import documented
from millstream.api.response import Responder
from millstream.api.response_schema import ResponseSchema
from millstream.errors import BadRequest
from millstream.types import EmbeddingRequest, Embeddings, Truncation

MAX_INPUTS = 2048


def _texts(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or len(texts) > MAX_INPUTS:
        raise BadRequest(f"input must be a text or a list of at most {MAX_INPUTS} texts.", param="input")
    return tuple(texts)


_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_INPUTS}]}


class OllamaEmbedRequest(OllamaModelRequest):
    """Texts to embed. Without any, the model is only loaded."""

    input: Annotated[tuple[str, ...], PlainValidator(_texts), WithJsonSchema(_INPUT)] = ()
    """A text, or a list of texts."""
    truncate: bool = True
    """Cut inputs that are too long. If false, they are an error."""
    dimensions: Annotated[Whole, Field(ge=1, le=2**20)] | None = None
    """Cut vectors to this size and normalise them again."""
    keep_alive: KeepAlive | None = None
    """How long the model stays loaded after this request: seconds, or a duration such as `5m`. Negative: for ever."""
    options: dict[str, Any] | None = None
    """Sampling parameters, which have no effect here."""


class OllamaEmbeddingsRequest(OllamaModelRequest):
    """A text to embed, in the older form."""

    prompt: str | None = None
    keep_alive: KeepAlive | None = None
    options: dict[str, Any] | None = None


class OllamaEmbeddings(ResponseSchema):
    model: str
    embeddings: list[list[float]]
    """One vector for each input, in their order."""
    total_duration: int
    """Nanoseconds."""
    load_duration: int
    prompt_eval_count: int
    """Tokens of all inputs."""


class OllamaEmbedding(ResponseSchema):
    embedding: list[float]


_EMBED = documented(OllamaEmbeddings, "The vectors.", errors=docs.ERRORS.references(SERVICE), body=OllamaEmbedRequest)
_EMBEDDINGS = documented(
    OllamaEmbedding, "The vector.", errors=docs.ERRORS.references(SERVICE), body=OllamaEmbeddingsRequest
)

Render = Callable[[Embeddings | None, Stopwatch], dict[str, Any]]


def routes(responder: Responder) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["ollama"], default_response_class=Response)

    @router.post("/embed", summary="Embed texts (Ollama)", openapi_extra=_EMBED)
    async def ollama_embed(request: Request) -> Response:
        parsed = await read_body(request, partial(named_request, OllamaEmbedRequest))
        asked = EmbeddingRequest(
            find_model(responder.services.models, parsed.model).name,
            parsed.input,
            dimensions=parsed.dimensions,
            truncation=Truncation() if parsed.truncate else None,
        )
        return EmbedResponse(responder, asked, parsed.keep_alive, partial(_many, parsed.model or ""))

    @router.post("/embeddings", summary="Embed one text (Ollama, older form)", openapi_extra=_EMBEDDINGS)
    async def ollama_embeddings(request: Request) -> Response:
        parsed = await read_body(request, partial(named_request, OllamaEmbeddingsRequest))
        inputs = (parsed.prompt,) if parsed.prompt else ()
        name = find_model(responder.services.models, parsed.model).name
        return EmbedResponse(
            responder, EmbeddingRequest(name, inputs, truncation=Truncation()), parsed.keep_alive, _one
        )

    return router


class EmbedResponse(ComputedResponse):
    """A client that leaves ends the work."""

    def __init__(
        self, responder: Responder, request: EmbeddingRequest, keep_alive: float | None, render: Render
    ) -> None:
        super().__init__(write_timeout=responder.write_timeout)
        self._services = responder.services
        self._request = request
        self._keep_alive = keep_alive
        self._render = render
        self._watch = Stopwatch()

    async def compute(self) -> bytes:
        services, request = self._services, self._request
        result = None
        if request.inputs:
            result = await services.encoding.embed(request)
        else:
            await services.models.load(request.model)
        if self._keep_alive is not None:
            services.models.keep_loaded(request.model, self._keep_alive)
        body = self._render(result, self._watch)
        return await self.on_thread(lambda: orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))


def _vectors(result: Embeddings | None) -> list[Any]:
    return [] if result is None else list(np.frombuffer(result.values, np.float32).reshape(-1, result.width))


def _many(name: str, result: Embeddings | None, watch: Stopwatch) -> dict[str, Any]:
    tokens = 0 if result is None else result.prompt_tokens
    return {"model": name, "embeddings": _vectors(result), **watch.load_fields(), "prompt_eval_count": tokens}


def _one(result: Embeddings | None, watch: Stopwatch) -> dict[str, Any]:
    return {"embedding": next(iter(_vectors(result)), [])}
