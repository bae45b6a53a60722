"""Starlette's own refusals (unknown URL, wrong method), written in the dialect of the request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from millstream.api.dialect import Dialects
from millstream.api.errors import PARAM_LENGTH, REQUEST_ID, shortened
from millstream.api.known_urls import hint
from millstream.api.methods import allowed_methods
from millstream.api.request_log import log_error
from millstream.errors import MillstreamError


def routing_error_handler(
    dialects: Dialects, served: Collection[str]
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Returns the app's handler of `HTTPException`. `served` are the paths of its routes."""

    async def handle(request: Request, exception: Exception) -> Response:
        assert isinstance(exception, HTTPException)
        headers = dict(exception.headers or {})
        if exception.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            # Starlette's own header lists the methods of one route only.
            headers = {"allow": ", ".join(allowed_methods(request.app.routes, request.scope))}
        error = _error(request, exception, headers.get("allow", ""), served)
        error.request_id = request.scope.get(REQUEST_ID)
        log_error(request.method, error)
        return dialects.of(request.scope).errors.response(error, headers)

    return handle


def _error(request: Request, exception: HTTPException, allowed: str, served: Collection[str]) -> MillstreamError:
    status = HTTPStatus(exception.status_code)
    path = shortened(request.url.path, PARAM_LENGTH)
    message, code = exception.detail, status.name.lower()
    if status is HTTPStatus.NOT_FOUND:
        code = "unknown_url"
        about = hint(request.url.path, served)
        message = f"No such URL: {request.method} {path}. {about}The routes are listed at /docs."
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{path} does not accept {request.method}. It accepts: {allowed}."
    error = MillstreamError(message)
    error.status, error.code = status.value, code
    error.kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return error
