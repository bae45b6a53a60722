"""POST /v1/audio/speech."""

from __future__ import annotations

from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import read_body, validated
from millstream.api.error_docs import SERVICE
from millstream.api.openai import docs
from millstream.api.openai.audio.speech_response import SpeechStream, WholeSpeech
from millstream.api.openai.audio.speech_schema import (
    EXAMPLES,
    IGNORED,
    UNSUPPORTED,
    SpeechAudioDelta,
    SpeechAudioDone,
    SpeechBody,
)
from millstream.api.openai.errors import ErrorResponse
from millstream.api.openapi import documented, reference
from millstream.api.params import supported
from millstream.api.response import Responder
from millstream.media.audio_encoding import MEDIA_TYPES, require_format
from millstream.speech_types import SpeechRequest


def _event_stream() -> dict[str, Any]:
    payload = {"anyOf": [reference(each) for each in (SpeechAudioDelta, SpeechAudioDone, ErrorResponse)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    schema = {
        "title": "SpeechEvent",
        "description": (
            "One server-sent event: a `data:` line and an empty line. `speech.audio.done` ends a complete stream. A "
            "failure after the first event is an event with an `error` field. A line that begins with a colon is a "
            "comment, sent to keep an idle connection open."
        ),
        "type": "object",
        "required": ["data"],
        "properties": {"data": data},
    }
    return {"text/event-stream": {"schema": schema}}


_DOCS = documented(
    {media_type: {"schema": {"type": "string", "format": "binary"}} for media_type in MEDIA_TYPES.values()},
    "The speech, sent sentence by sentence as it is made.",
    errors=docs.ERRORS.references(SERVICE),
    body=SpeechBody,
    examples=EXAMPLES,
    stream=_event_stream(),
)


def routes(responder: Responder) -> APIRouter:
    router = APIRouter(prefix="/v1/audio", tags=["speech"], default_response_class=Response)

    @router.post("/speech", summary="Speak a text", openapi_extra=_DOCS)
    async def speech(request: Request) -> Response:
        body = await read_body(request, _parse)
        await to_thread.run_sync(require_format, body.response_format)  # before a model is loaded for it
        service, asked = responder.services.speech, speech_request(body)
        if not body.stream and body.stream_format == "audio":
            return WholeSpeech(service, asked, body.response_format, write_timeout=responder.write_timeout)
        return SpeechStream(
            service,
            asked,
            body.response_format,
            as_events=body.stream_format == "sse",
            ping_seconds=responder.ping_seconds,
            write_timeout=responder.write_timeout,
        )

    return router


def _parse(body: dict[str, object]) -> SpeechBody:
    return validated(SpeechBody, supported(body, SpeechBody.model_fields, UNSUPPORTED, IGNORED))


def speech_request(body: SpeechBody) -> SpeechRequest:
    return SpeechRequest(
        body.model,
        body.input,
        voice=body.voice,
        speed=body.speed,
        language=body.language or body.lang_code or None,
        instructions=(body.instructions or "").strip() or None,
    )
