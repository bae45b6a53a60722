"""Errors as clients see them: OpenAI's shape, whatever went wrong and wherever."""

from __future__ import annotations

from http import HTTPStatus

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from millstream.errors import EngineBusy, MillstreamError, Unauthorized

JSON_TYPE = "application/json"


def error_body(error: MillstreamError) -> dict[str, object]:
    """The `{"error": ...}` object, the same in a plain answer and inside a stream."""
    fields: dict[str, object] = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    if isinstance(error, EngineBusy):
        fields |= {"active": error.active, "waiting": error.waiting}
    return {"error": fields}


def error_response(error: MillstreamError) -> Response:
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    elif isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return json_response(error_body(error), status=error.status, headers=headers)


def json_response(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status_code=status, headers=headers, media_type=JSON_TYPE)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, wrong method. Its headers (`Allow`) are kept."""
    assert isinstance(error, HTTPException)
    message, code = error.detail, HTTPStatus(error.status_code).name.lower()
    if error.status_code == HTTPStatus.NOT_FOUND:
        code = "unknown_url"
        message = f"No such URL: {request.method} {request.url.path}. The routes are listed at /docs."
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.url.path} does not take {request.method}."
    kind = "invalid_request_error" if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return json_response(body, status=error.status_code, headers=dict(error.headers or {}))
