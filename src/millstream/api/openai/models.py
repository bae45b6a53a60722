"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from millstream.api.errors import json_response
from millstream.errors import NotFound
from millstream.service.ports import TextService
from millstream.types import ModelCard


def routes(service: TextService) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["models"])

    @router.get("/models", summary="The models that this server answers with")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_fields(card) for card in service.models()]})

    # A path, because the ids of hub models contain a slash.
    @router.get("/models/{model:path}", summary="One of these models")
    async def model(model: str) -> Response:
        for card in service.models():
            if card.name == model:
                return json_response(_fields(card))
        raise NotFound(f"There is no model {model!r} here. /v1/models lists those there are.", param="model")

    return router


def _fields(card: ModelCard) -> dict[str, object]:
    """OpenAI's four fields, and two that local tools look for."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "millstream",
        "state": card.state,
        "context_length": card.context_length,
    }
