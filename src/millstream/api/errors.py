"""Errors as clients see them: OpenAI's shape, whatever went wrong and wherever."""

from __future__ import annotations

from http import HTTPStatus

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from millstream.api.methods import allowed_methods
from millstream.errors import EngineBusy, MillstreamError, Unauthorized

JSON_TYPE = "application/json"
MESSAGE_LENGTH = 2000
PARAM_LENGTH = 200
"""Characters. What a client sent may stand in an error, but never all of a long text."""


def shortened(text: str, length: int) -> str:
    """The beginning and the end of a long text."""
    return text if len(text) <= length else f"{text[: length * 2 // 3]}…{text[-(length // 3) :]}"


def printable(text: str) -> str:
    """A client's text for one line of the log: shortened, and what cannot be printed is escaped."""
    text = shortened(text, PARAM_LENGTH)
    return text if text.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def error_body(error: MillstreamError) -> dict[str, object]:
    """The `{"error": ...}` object, the same in a plain answer and inside a stream."""
    fields: dict[str, object] = {
        "message": shortened(error.message, MESSAGE_LENGTH),
        "type": error.kind,
        "param": None if error.param is None else shortened(error.param, PARAM_LENGTH),
        "code": error.code,
    }
    if isinstance(error, EngineBusy):
        fields |= {"active": error.active, "waiting": error.waiting}
    return {"error": fields}


def error_headers(error: MillstreamError) -> dict[str, str]:
    if error.retry_after is not None:
        return {"retry-after": str(error.retry_after)}
    return {"www-authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}


def error_response(error: MillstreamError) -> Response:
    return json_response(error_body(error), status=error.status, headers=error_headers(error))


def json_response(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status_code=status, headers=headers, media_type=JSON_TYPE)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, wrong method. Its headers are kept; its `Allow` knows one route only."""
    assert isinstance(error, HTTPException)
    message, code = error.detail, HTTPStatus(error.status_code).name.lower()
    headers = dict(error.headers or {})
    path = shortened(request.url.path, PARAM_LENGTH)
    if error.status_code == HTTPStatus.NOT_FOUND:
        code = "unknown_url"
        message = f"No such URL: {request.method} {path}. The routes are listed at /docs."
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"allow": ", ".join(allowed_methods(request.app.routes, request.scope))}
        message = f"{path} does not take {request.method}. It takes: {headers['allow']}."
    kind = "invalid_request_error" if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return json_response(body, status=error.status_code, headers=headers)
