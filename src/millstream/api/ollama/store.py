"""POST /api/pull, and the routes of Ollama that change its store of models, which this server does not have.

Models are chosen when the server starts. These routes answer so that a client can tell its user what to do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import read_body
from millstream.api.error_docs import ANY_REQUEST
from millstream.api.errors import json_response
from millstream.api.ollama import docs
from millstream.api.ollama.model_schema import OllamaStatus
from millstream.api.ollama.names import find_model
from millstream.api.ollama.requests import named_request
from millstream.api.ollama.schema import OllamaPullRequest
from millstream.api.openapi import documented
from millstream.errors import BadRequest, NotFound
from millstream.service.ports import ModelService

_PULL = documented(
    OllamaStatus,
    "The model is served here: as lines of JSON, or whole if `stream` is false.",
    errors=docs.ERRORS.references(ANY_REQUEST | {404}),
    body=OllamaPullRequest,
    stream=docs.line_stream(OllamaStatus),
)

_REFUSED = {
    ("DELETE", "/delete"): "delete models. To free a model's memory, send keep_alive 0 with an empty prompt",
    ("POST", "/copy"): "copy models. A model's further names are the aliases in the configuration file",
    ("POST", "/push"): "push models",
    ("POST", "/create"): "create models. Give the server a folder, a GGUF file or a hub id when you start it",
    ("POST", "/blobs/{digest}"): "take files of models. Give it a folder, a GGUF file or a hub id when you start it",
}
"""What the server does not do, by route."""


def routes(service: ModelService) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["ollama"], default_response_class=Response)

    @router.post("/pull", summary="Ask for a model that is served here (Ollama)", openapi_extra=_PULL)
    async def ollama_pull(request: Request) -> Response:
        parsed = await read_body(request, partial(named_request, OllamaPullRequest))
        _find(service, parsed.model)
        if parsed.stream is False:
            return json_response({"status": "success"})
        lines = [orjson.dumps({"status": status}) + b"\n" for status in ("pulling manifest", "success")]
        return Response(b"".join(lines), media_type="application/x-ndjson")

    for (method, path), action in _REFUSED.items():
        router.add_api_route(path, _refuse(action), methods=[method], include_in_schema=False)
    return router


def _find(service: ModelService, name: str | None) -> None:
    try:
        find_model(service, name)
    except NotFound as error:
        message = f"{error.message} This server does not download models by request: start it with the model's name."
        raise NotFound(message, param=error.param) from error


def _refuse(action: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise BadRequest(f"This server does not {action}.")

    return refuse
