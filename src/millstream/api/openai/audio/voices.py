"""GET /v1/audio/voices and /v1/audio/models: not OpenAI's, but what Open WebUI and other clients ask for."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from millstream.api.error_docs import ANY_REQUEST, SERVICE
from millstream.api.errors import json_response
from millstream.api.openai.audio.speech_schema import SpeechModelList, VoiceList
from millstream.api.openai.docs import ERRORS
from millstream.api.openapi import documented
from millstream.service.ports import Services
from millstream.speech_types import Voice

SPEECH = "speech"
"""What the capabilities of models that speak have."""

_VOICES = documented(VoiceList, "The voices of a speech model.", errors=ERRORS.references(SERVICE))
_MODELS = documented(SpeechModelList, "All models that speak, loaded or not.", errors=ERRORS.references(ANY_REQUEST))

ModelName = Annotated[str, Query(description="The model's id or alias. Default: the server's first speech model.")]


def routes(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1/audio", tags=["speech"], default_response_class=Response)

    @router.get("/voices", summary="List the voices of a speech model", openapi_extra=_VOICES)
    async def voices(model: ModelName = "") -> Response:
        return json_response({"voices": [_fields(voice) for voice in await services.speech.voices(model)]})

    @router.get("/models", summary="List the models that speak", openapi_extra=_MODELS)
    async def speech_models() -> Response:
        speaking = [card.name for card in services.models.models() if SPEECH in card.capabilities]
        return json_response({"models": [{"id": name, "name": name} for name in speaking]})

    return router


def _fields(voice: Voice) -> dict[str, str]:
    known = {"language": voice.language, "gender": voice.gender}
    return {"id": voice.name, "name": voice.name, "object": "voice"} | {
        name: value for name, value in known.items() if value is not None
    }
