"""OpenAI's dialect, as the app registers it."""

from __future__ import annotations

from fastapi import APIRouter

from millstream.api.dialect import Dialect, DialectDocs
from millstream.api.errors import ErrorFormat
from millstream.api.openai import chat, completions, embeddings, models, rerank
from millstream.api.openai.audio import transcription_schema, transcriptions
from millstream.api.openai.docs import ERRORS
from millstream.api.openai.embedding_schema import EmbeddingList, EmbeddingsRequest
from millstream.api.openai.errors import error_body
from millstream.api.openai.model_schema import ModelList
from millstream.api.openai.rerank import RERANK_PATHS, SCORE_PATHS
from millstream.api.openai.rerank_schema import RankedList, RerankBody, ScoreBody, ScoreList
from millstream.api.openai.response_schema import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from millstream.api.openai.responses import response_schema as responses_schema
from millstream.api.openai.responses import routes as responses
from millstream.api.openai.responses.schema import InputTokensRequest, ResponseRequest
from millstream.api.openai.schema import ChatRequest, CompletionRequest
from millstream.api.response import Responder


def _routes(responder: Responder) -> tuple[APIRouter, ...]:
    return (
        chat.routes(responder),
        completions.routes(responder),
        responses.routes(responder),
        embeddings.routes(responder),
        rerank.routes(responder),
        transcriptions.routes(responder),
        models.routes(responder.services.models),
    )


OPENAI = Dialect(
    name="openai",
    routes=_routes,
    errors=ErrorFormat(error_body),
    docs=DialectDocs(
        errors=ERRORS,
        bodies=(
            ChatRequest,
            CompletionRequest,
            ResponseRequest,
            InputTokensRequest,
            EmbeddingsRequest,
            RerankBody,
            ScoreBody,
            transcription_schema.TranscriptionBody,
        ),
        responses=(
            ChatCompletion,
            ChatCompletionChunk,
            Completion,
            CompletionChunk,
            ModelList,
            EmbeddingList,
            RankedList,
            ScoreList,
            *transcription_schema.MODELS,
            *responses_schema.MODELS,
        ),
        tags=(
            {"name": "text", "description": "Generate text, whole or streamed."},
            {"name": "responses", "description": "Generate, store and continue responses."},
            {"name": "embeddings", "description": "Vectors for texts."},
            {"name": "rerank", "description": "Scores for texts against each other."},
            {"name": "transcription", "description": "Text from speech."},
            {"name": "models", "description": "List, load and unload models."},
        ),
    ),
    paths=("/v1/chat", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/audio", *RERANK_PATHS, *SCORE_PATHS),
    upload_paths=transcriptions.PATHS,
    admin_paths=(models.ADMIN_PATH,),
)
