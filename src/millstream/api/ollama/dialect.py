"""Ollama's dialect, as the app registers it."""

from __future__ import annotations

from fastapi import APIRouter

from millstream.api.dialect import Dialect, DialectDocs
from millstream.api.errors import ErrorFormat
from millstream.api.ollama import embed, models, store, text
from millstream.api.ollama.docs import ERRORS
from millstream.api.ollama.errors import error_body
from millstream.api.ollama.model_schema import OllamaModel, OllamaRunning, OllamaStatus, OllamaTags, OllamaVersion
from millstream.api.ollama.response_schema import OllamaChat, OllamaChatLine, OllamaGenerated, OllamaGeneratedLine
from millstream.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, OllamaPullRequest, OllamaShowRequest
from millstream.api.response import Responder


def _routes(responder: Responder) -> tuple[APIRouter, ...]:
    service = responder.services.models
    return text.routes(responder), embed.routes(responder), models.routes(service), store.routes(service)


OLLAMA = Dialect(
    name="ollama",
    routes=_routes,
    errors=ErrorFormat(error_body),
    docs=DialectDocs(
        errors=ERRORS,
        bodies=(
            OllamaChatRequest,
            OllamaGenerateRequest,
            OllamaShowRequest,
            OllamaPullRequest,
            embed.OllamaEmbedRequest,
            embed.OllamaEmbeddingsRequest,
        ),
        responses=(
            OllamaChat,
            OllamaChatLine,
            OllamaGenerated,
            OllamaGeneratedLine,
            OllamaTags,
            embed.OllamaEmbeddings,
            embed.OllamaEmbedding,
            OllamaRunning,
            OllamaModel,
            OllamaVersion,
            OllamaStatus,
        ),
        tags=({"name": "ollama", "description": "Ollama's API."},),
    ),
    paths=("/api",),
)
