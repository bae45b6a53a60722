"""Routes about the server itself. None of them asks an engine, so they answer while every engine is busy."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from millstream import __version__
from millstream.api.errors import json_response
from millstream.service.ports import TextService


def routes(service: TextService) -> APIRouter:
    router = APIRouter(tags=["system"])

    @router.get("/", include_in_schema=False)
    async def root() -> Response:
        return json_response({"name": "Millstream", "version": __version__, "docs": "/docs"})

    @router.get("/health", summary="Is the server up, and what are its models doing?")
    async def health() -> Response:
        """`ok`; `degraded` if some models have failed; `failed`, with status 503, if all have."""
        states = service.healthy()
        failed = [name for name, state in states.items() if state == "failed"]
        status = "ok" if not failed else "degraded" if len(failed) < len(states) else "failed"
        return json_response({"status": status, "models": states}, status=503 if status == "failed" else 200)

    @router.get("/metrics", summary="Figures in the Prometheus text format")
    async def metrics() -> Response:
        page, content_type = service.render_metrics()
        return Response(page, headers={"content-type": content_type})

    return router
