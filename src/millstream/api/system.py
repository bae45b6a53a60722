"""Routes about the server itself. None of them asks an engine, so they answer while every engine is busy."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from millstream import __version__
from millstream.api.error_docs import ANY_REQUEST, ErrorAnswer
from millstream.api.errors import json_response
from millstream.api.openapi import documented, reference
from millstream.api.system_schema import About, Health
from millstream.service.ports import ModelService

_HEALTH = documented(Health, "The server answers, and at least one model does or will.", errors=ANY_REQUEST)
_HEALTH["responses"]["503"] = {
    "description": "Every model has failed, or the server is full or stopping.",
    "content": {"application/json": {"schema": {"anyOf": [reference(Health), reference(ErrorAnswer)]}}},
}
_PAGE: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
_METRICS = documented(_PAGE, "One metric a line, with comments.", errors=ANY_REQUEST)
_ABOUT = documented(About, "The server's name and version.", errors=ANY_REQUEST)


def routes(service: ModelService) -> APIRouter:
    router = APIRouter(tags=["system"], default_response_class=Response)

    @router.get("/", summary="What this server is", openapi_extra=_ABOUT)
    async def about() -> Response:
        return json_response({"name": "Millstream", "version": __version__, "docs": "/docs"})

    @router.get("/health", summary="Is the server up, and what are its models doing?", openapi_extra=_HEALTH)
    async def health() -> Response:
        """`ok`; `degraded` if some models have failed; `failed`, with status 503, if all have."""
        states = service.healthy()
        failed = [name for name, state in states.items() if state == "failed"]
        status = "ok" if not failed else "degraded" if len(failed) < len(states) else "failed"
        return json_response({"status": status, "models": states}, status=503 if status == "failed" else 200)

    @router.get("/metrics", summary="Figures in the Prometheus text format", openapi_extra=_METRICS)
    async def metrics() -> Response:
        page, content_type = service.render_metrics()
        return Response(page, headers={"content-type": content_type})

    return router
