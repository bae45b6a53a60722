"""GET /v1/models and /v1/models/{id}; POST /v1/models/{id}/load, /unload and /cache/clear."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from millstream.api.errors import json_response
from millstream.errors import NotFound
from millstream.service.ports import TextService
from millstream.types import ModelCard


def routes(service: TextService) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["models"])

    @router.get("/models", summary="The models that this server answers with, and how each of them is")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_fields(card) for card in service.models()]})

    # Paths, because the ids of hub models contain a slash.
    @router.get("/models/{model:path}", summary="One of these models")
    async def model(model: str) -> Response:
        for card in service.models():
            if model == card.name or model in card.aliases:
                return json_response(_fields(card))
        raise NotFound(f"There is no model {model!r} here. /v1/models lists those there are.", param="model")

    @router.post("/models/{model:path}/load", summary="Load a model now; answers when it is there")
    async def load(model: str) -> Response:
        return json_response(_fields(await service.load(model)))

    @router.post("/models/{model:path}/unload", summary="Free a model; it is loaded again when it is used")
    async def unload(model: str) -> Response:
        return json_response(_fields(await service.unload(model)))

    @router.post("/models/{model:path}/cache/clear", summary="Forget the beginnings of prompts that a model keeps")
    async def clear_cache(model: str) -> Response:
        return json_response(_fields(service.clear_cache(model)))

    return router


def _fields(card: ModelCard) -> dict[str, object]:
    """OpenAI's four fields, and what an operator wants to know."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "millstream",
        "state": card.state,
        "progress": card.progress,
        "error": card.error,
        "aliases": list(card.aliases),
        "isolation": card.isolation,
        "pid": card.pid,
        "thread": card.thread,
        "pinned": card.pinned,
        "memory_bytes": card.memory_bytes,
        "prefix_cache_bytes": card.prefix_cache_bytes,
        "prefix_cache_disk_bytes": card.prefix_cache_disk_bytes,
        "reserved_bytes": card.reserved_bytes,
        "kv_bytes_per_token": card.kv_bytes_per_token,
        "active": card.active,
        "waiting": card.waiting,
        "max_batch": card.max_batch,
        "context_length": card.context_length,
        "restarts": card.restarts,
    }
