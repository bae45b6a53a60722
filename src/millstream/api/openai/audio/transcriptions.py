"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import RELEASE_BODY
from millstream.api.error_docs import SERVICE
from millstream.api.form import FORM_TYPE
from millstream.api.openai import docs
from millstream.api.openai.audio.transcription_request import Task, read_transcription
from millstream.api.openai.audio.transcription_response import Starter, TranscriptStream, WholeTranscript
from millstream.api.openai.audio.transcription_schema import (
    EVENTS,
    EXAMPLES,
    Transcript,
    TranscriptionBody,
    VerboseTranscript,
)
from millstream.api.openai.errors import ErrorResponse
from millstream.api.openapi import documented, reference
from millstream.api.response import Responder

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")


def _event_stream() -> dict[str, Any]:
    payload = {"anyOf": [reference(each) for each in (*EVENTS, ErrorResponse)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    schema = {
        "title": "TranscriptEvent",
        "description": (
            "One server-sent event: a `data:` line and an empty line. `transcript.text.done` ends a complete stream. A "
            "failure after the first event is an event with an `error` field. A line that begins with a colon is a "
            "comment, sent to keep an idle connection open."
        ),
        "type": "object",
        "required": ["data"],
        "properties": {"data": data},
    }
    return {"text/event-stream": {"schema": schema}}


def _documented(description: str) -> dict[str, Any]:
    operation = documented(
        {
            "application/json": {"schema": {"anyOf": [reference(Transcript), reference(VerboseTranscript)]}},
            "text/plain": {"schema": {"type": "string"}},
        },
        description,
        errors=docs.ERRORS.references(SERVICE),
        body=TranscriptionBody,
        examples=EXAMPLES,
        stream=_event_stream(),
    )
    form = {
        "type": "object",
        "description": "The fields of `TranscriptionBody` as text; lists as `name[]`, once for each value.",
        "required": ["file"],
        "properties": {"file": {"type": "string", "format": "binary", "description": "The audio file."}},
        "additionalProperties": True,
    }
    operation["requestBody"]["content"][FORM_TYPE] = {"schema": form}
    return operation


def routes(responder: Responder) -> APIRouter:
    router = APIRouter(prefix="/v1/audio", tags=["transcription"], default_response_class=Response)
    said = "The transcript: whole in the format that was asked for, or with `stream` as server-sent events."

    @router.post("/transcriptions", summary="Transcribe audio", openapi_extra=_documented(said))
    async def transcriptions(request: Request) -> Response:
        return await _respond(request, responder, "transcribe")

    translated = said.replace("The transcript", "The transcript in English")

    @router.post("/translations", summary="Translate audio into English", openapi_extra=_documented(translated))
    async def translations(request: Request) -> Response:
        return await _respond(request, responder, "translate")

    return router


async def _respond(request: Request, responder: Responder, task: Task) -> Response:
    body, asked = await read_transcription(request, task)
    starter = Starter(responder.services.transcription, asked, request.scope[RELEASE_BODY])
    if not body.stream:
        return WholeTranscript(starter, body, write_timeout=responder.write_timeout)
    return TranscriptStream(starter, body, ping_seconds=responder.ping_seconds, write_timeout=responder.write_timeout)
