"""GET /api/tags, /api/ps and /api/version; POST /api/show."""

from __future__ import annotations

import hashlib
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import read_body
from millstream.api.error_docs import ANY_REQUEST
from millstream.api.errors import json_response
from millstream.api.ollama.docs import ERRORS
from millstream.api.ollama.model_schema import OllamaModel, OllamaRunning, OllamaTags, OllamaVersion
from millstream.api.ollama.names import find_model
from millstream.api.ollama.render import rfc3339
from millstream.api.ollama.requests import named_request
from millstream.api.ollama.schema import OllamaShowRequest
from millstream.api.openapi import documented
from millstream.model_facts import ModelCard
from millstream.service.ports import ModelService

VERSION = "0.13.5"
"""The version of Ollama whose API is served. Clients compare it: some want 0.6.4 or later for `capabilities`, and
log-probabilities came with 0.12.11."""
NEVER = "2318-01-01T00:00:00.000000Z"
"""When a model expires that stays loaded. Clients show a time that far away as "forever"."""

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_UNKNOWN = "unknown"

_TAGS = documented(OllamaTags, "All models, loaded or not.", errors=ERRORS.references(ANY_REQUEST))
_PS = documented(OllamaRunning, "The models that are loaded.", errors=ERRORS.references(ANY_REQUEST))
_VERSION = documented(OllamaVersion, "The version.", errors=ERRORS.references(ANY_REQUEST))
_SHOW = documented(
    OllamaModel, "The model.", errors=ERRORS.references(ANY_REQUEST | {404}), body=OllamaShowRequest, examples={}
)


def routes(service: ModelService) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["ollama"], default_response_class=Response)

    @router.get("/tags", summary="List the models (Ollama)", openapi_extra=_TAGS)
    async def ollama_tags() -> Response:
        return json_response({"models": [_listed(card) for card in service.models()]})

    @router.get("/ps", summary="List the loaded models (Ollama)", openapi_extra=_PS)
    async def ollama_ps() -> Response:
        return json_response({"models": [_running(card) for card in service.models() if card.state == "ready"]})

    @router.get("/version", summary="The version of Ollama's API that is served", openapi_extra=_VERSION)
    async def ollama_version() -> Response:
        return json_response({"version": VERSION})

    @router.post("/show", summary="Describe a model (Ollama)", openapi_extra=_SHOW)
    async def ollama_show(request: Request) -> Response:
        parsed = await read_body(request, partial(named_request, OllamaShowRequest))
        return json_response(_shown(find_model(service, parsed.model)))

    return router


def _named(card: ModelCard, size: int) -> dict[str, object]:
    digest = hashlib.sha256(card.name.encode()).hexdigest()
    return {"name": card.name, "model": card.name, "size": size, "digest": digest, "details": _details(card)}


def _listed(card: ModelCard) -> dict[str, object]:
    return _named(card, card.file_bytes or 0) | {"modified_at": rfc3339(card.created)}


def _running(card: ModelCard) -> dict[str, object]:
    on_gpu = card.device is not None and not card.device.startswith("cpu")
    return _named(card, card.memory_bytes) | {
        "size_vram": card.memory_bytes if on_gpu else 0,
        "expires_at": NEVER if card.expires is None else rfc3339(card.expires),
        "context_length": card.context_length or 0,
    }


def _details(card: ModelCard) -> dict[str, object]:
    """No field is null: typed clients refuse a whole list for one."""
    return {
        "parent_model": "",
        "format": card.format or "",
        "family": card.family or "",
        "families": [card.family] if card.family else [],
        "parameter_size": _parameter_size(card.parameters),
        "quantization_level": card.quantization or "",
    }


def _parameter_size(count: int | None) -> str:
    for unit, letter in _UNITS:
        if count is not None and count >= unit:
            return f"{count / unit:.2f}".rstrip("0").rstrip(".") + letter
    return "" if count is None else str(count)


def _shown(card: ModelCard) -> dict[str, object]:
    family = card.family or _UNKNOWN
    info: dict[str, object] = {"general.architecture": family, "general.basename": card.name}
    if card.parameters is not None:
        info["general.parameter_count"] = card.parameters
    if card.context_length is not None:
        info[f"{family}.context_length"] = card.context_length
    return {
        "modelfile": f"# This model is served by Millstream.\nFROM {card.name}",
        "parameters": f"{'num_ctx':<30} {card.context_length}" if card.context_length else "",
        "template": card.template or "",
        "details": _details(card),
        "model_info": info,
        "capabilities": list(card.capabilities) or ["completion"],
        "modified_at": rfc3339(card.created),
    }
