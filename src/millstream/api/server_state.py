"""GET /server/...: what the server does now and did in the last hour. No engine is asked."""

from __future__ import annotations

import math
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from millstream import __version__
from millstream.api.error_docs import ANY_REQUEST, ErrorDocs
from millstream.api.errors import json_response, shortened
from millstream.api.openapi import documented
from millstream.api.server_state_schema import MAX_REQUESTS, ServerHistory, ServerRequests, Status
from millstream.errors import BadRequest
from millstream.service.ports import ServerState

_DEFAULT_LIMIT = 100


def routes(state: ServerState, errors: ErrorDocs) -> APIRouter:
    """`errors` documents the errors of these routes, which belong to the default dialect."""
    router = APIRouter(prefix="/server", tags=["system"], default_response_class=Response)
    refusals = errors.references(ANY_REQUEST)
    status_docs = documented(Status, "The server as a whole.", errors=refusals)
    history_docs = documented(ServerHistory, "One sample per interval and model.", errors=refusals)
    history_docs["parameters"] = [
        _parameter("since", {"type": "number", "default": 0}, "Samples after this time, in seconds since 1970.")
    ]
    requests_docs = documented(ServerRequests, "Requests to models, newest first.", errors=refusals)
    limit = {"type": "integer", "minimum": 0, "maximum": MAX_REQUESTS, "default": _DEFAULT_LIMIT}
    requests_docs["parameters"] = [_parameter("limit", limit, "Most requests that have ended.")]

    @router.get("/status", summary="Uptime and memory of the server", openapi_extra=status_docs)
    async def server_status() -> Response:
        """The models are at /v1/models."""
        status = state.status()
        return json_response(
            {
                "version": __version__,
                "uptime": status.uptime,
                "memory": {"budget_bytes": status.memory_budget, "used_bytes": status.memory_used},
                "process": {"pid": status.pid, "rss_bytes": status.rss_bytes},
            }
        )

    @router.get("/history", summary="The last hour of each model", openapi_extra=history_docs)
    async def server_history(request: Request) -> Response:
        """Figures per model in samples of a few seconds: tokens per second, latencies, memory. `null` is unknown."""
        return json_response(state.history(_since(request)))

    @router.get("/requests", summary="Running and recent requests", openapi_extra=requests_docs)
    async def server_requests(request: Request) -> Response:
        """Each with the phases that it went through. What was said is never kept."""
        running, recent = state.requests(_limit(request))
        return json_response({"running": running, "recent": recent})

    return router


def _parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def _since(request: Request) -> float:
    text = request.query_params.get("since", "0")
    try:
        since = float(text)
    except ValueError:
        since = math.nan
    if math.isnan(since):
        raise BadRequest(f"since is {shortened(text, 50)!r}, not a number of seconds since 1970.", param="since")
    return since


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(_DEFAULT_LIMIT))
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) <= MAX_REQUESTS):
        raise BadRequest(f"limit is {shortened(text, 50)!r}, not an integer from 0 to {MAX_REQUESTS}.", param="limit")
    return int(text)
