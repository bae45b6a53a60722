"""Routes about the server itself. They ask no engine, so they respond while every engine is busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from millstream import __version__
from millstream.api.error_docs import ANY_REQUEST, ErrorDocs
from millstream.api.errors import json_response
from millstream.api.openapi import documented, reference
from millstream.api.system_schema import About, Health
from millstream.service.ports import ModelService

_TEXT: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}


def routes(service: ModelService, problems: Callable[[], Sequence[str]], errors: ErrorDocs) -> APIRouter:
    """`errors` documents the errors of these routes, which belong to the default dialect."""
    router = APIRouter(tags=["system"], default_response_class=Response)
    refusals = errors.references(ANY_REQUEST)
    about_docs = documented(About, "The server's name and version.", errors=refusals)
    metrics_docs = documented(_TEXT, "One metric per line, with comments.", errors=refusals)

    @router.get("/", summary="The server's name and version", openapi_extra=about_docs)
    async def about() -> Response:
        response = json_response({"name": "Millstream", "version": __version__, "docs": "/docs"})
        response.headers["vary"] = "accept"  # browsers get the page, see api/pages/
        return response

    @router.get("/health", summary="State of the server and its models", openapi_extra=_health_docs(errors))
    async def health() -> Response:
        """`ok`; `degraded` if some models have failed or there are problems; `failed`, with status 503, if all have."""
        states, found = service.healthy(), list(problems())
        failed = [name for name, state in states.items() if state == "failed"]
        status = "failed" if failed and len(failed) == len(states) else "degraded" if failed or found else "ok"
        body = {"status": status, "models": states} | ({"problems": found} if found else {})
        return json_response(body, status=503 if status == "failed" else 200)

    @router.get("/metrics", summary="Metrics in the Prometheus text format", openapi_extra=metrics_docs)
    async def metrics() -> Response:
        page, content_type = service.render_metrics()
        return Response(page, headers={"content-type": content_type})

    return router


def _health_docs(errors: ErrorDocs) -> dict[str, Any]:
    unavailable = {
        "description": "Every model has failed, or the server is full or stopping.",
        "content": {"application/json": {"schema": {"anyOf": [reference(Health), reference(errors.schema)]}}},
    }
    refusals = errors.references(ANY_REQUEST) | {"503": unavailable}
    return documented(Health, "The server is up, and at least one model is ready or will be.", errors=refusals)
