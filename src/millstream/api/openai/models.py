"""GET /v1/models and /v1/models/{id}; POST /v1/models/{id}/load, /unload and /cache/clear."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response

from millstream.api.error_docs import ANY_REQUEST, SERVICE
from millstream.api.errors import json_response, without_paths
from millstream.api.openai.docs import ERRORS
from millstream.api.openai.model_schema import Model, ModelList
from millstream.api.openapi import documented
from millstream.errors import NotFound
from millstream.model_facts import Calibration, ModelCard, SpeculationCard
from millstream.service.ports import ModelService

ADMIN_PATH = re.compile(r"/v1/models/.+/(?:load|unload|cache/clear)", re.DOTALL)
"""The routes below that change the server. Extend it with every route of that kind."""


class ModelIdConvertor(Convertor[str]):
    """Matches a model id in a path. Ids may contain a slash but never end like an action, so each URL has one route."""

    regex = "(?:(?!/(?:load|unload|cache/clear)$).)+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("model_id", ModelIdConvertor())

ModelId = Annotated[
    str,
    Path(
        description="The model's id or one of its aliases. A slash may be sent as such or as %2F.",
        json_schema_extra={"minLength": 1},
        examples=["millstream-demo", "mlx-community/Qwen3-4B-4bit"],
    ),
]

_LIST = documented(ModelList, "All models, loaded or not.", errors=ERRORS.references(ANY_REQUEST))
_ONE = documented(Model, "The model.", errors=ERRORS.references(ANY_REQUEST | {404}))
_CHANGED = documented(Model, "The model in its new state.", errors=ERRORS.references(SERVICE))


def routes(service: ModelService) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["models"], default_response_class=Response)

    @router.get("/models", summary="List the models", openapi_extra=_LIST)
    async def models() -> Response:
        return json_response({"object": "list", "data": [_fields(card) for card in service.models()]})

    @router.get("/models/{model:model_id}", summary="Describe one model", openapi_extra=_ONE)
    async def model(model: ModelId) -> Response:
        for card in service.models():
            if model == card.name or model in card.aliases:
                return json_response(_fields(card))
        raise NotFound(f"There is no model {model[:200]!r} on this server. /v1/models lists its models.", param="model")

    @router.post(
        "/models/{model:model_id}/load", summary="Load a model, and respond when it is loaded", openapi_extra=_CHANGED
    )
    async def load(model: ModelId) -> Response:
        return json_response(_fields(await service.load(model)))

    @router.post(
        "/models/{model:model_id}/unload",
        summary="Unload a model; it is loaded again on its next use",
        openapi_extra=_CHANGED,
    )
    async def unload(model: ModelId) -> Response:
        return json_response(_fields(await service.unload(model)))

    @router.post("/models/{model:model_id}/cache/clear", summary="Clear a model's prefix cache", openapi_extra=_CHANGED)
    async def clear_cache(model: ModelId) -> Response:
        return json_response(_fields(service.clear_cache(model)))

    return router


def _fields(card: ModelCard) -> dict[str, object]:
    """OpenAI's four fields, and more for operators."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "millstream",
        "state": card.state,
        "progress": card.progress,
        "phase": card.phase,
        "error": None if card.error is None else without_paths(card.error),
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
        "capabilities": list(card.capabilities),
        "family": card.family,
        "quantization": card.quantization,
        "device": card.device,
        "weight_bytes": card.weight_bytes,
        "notes": list(card.notes),
        "speculation": _speculation(card.speculation),
        "calibration": _calibration(card.calibration),
        **({} if card.dimensions is None else {"dimensions": card.dimensions}),
        **({"languages": list(card.languages)} if card.languages else {}),
    }


def _speculation(card: SpeculationCard | None) -> dict[str, object] | None:
    if card is None:
        return None
    return {
        "drafters": list(card.drafters),
        "passes": card.passes,
        "gain": card.gain,
        "drafts": [
            {"drafter": each.drafter, "proposed": each.proposed, "accepted": each.accepted} for each in card.drafts
        ],
    }


def _calibration(measured: Calibration | None) -> dict[str, object] | None:
    if measured is None:
        return None
    return {
        "chunks": [{"tokens": tokens, "seconds": seconds} for tokens, seconds in measured.chunks],
        "steps": [{"rows": rows, "seconds": seconds} for rows, seconds in measured.steps],
        "workspace_bytes": measured.workspace_bytes,
    }
