"""Errors in Anthropic's shape, the same in a plain response and inside a stream."""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal

import orjson

from millstream.api.errors import MESSAGE_LENGTH, ErrorFormat, error_status, shortened, told
from millstream.api.response_schema import ResponseSchema
from millstream.errors import ContextOverflow, EngineBusy, MillstreamError, Overloaded

OVERLOADED = 529
"""Anthropic's status for a server that is full. Its clients know it and try again."""

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    OVERLOADED: "overloaded_error",
}


class AnthropicErrorObject(ResponseSchema):
    """What went wrong."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "api_error",
        "overloaded_error",
    ]
    message: str
    """For people: which field was wrong, and what would be right."""


class AnthropicErrorResponse(ResponseSchema):
    """The body of every response with a status of 400 or more. In a stream that has begun, it is the last event."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None
    """The id in the `request-id` header."""


def http_status(error: MillstreamError) -> int:
    return OVERLOADED if isinstance(error, EngineBusy | Overloaded) else error_status(error)


def error_body(error: MillstreamError) -> bytes:
    fields = {"type": _type(http_status(error)), "message": shortened(_message(error), MESSAGE_LENGTH)}
    return orjson.dumps({"type": "error", "error": fields, "request_id": error.request_id})


def _type(status: int) -> str:
    default = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    return _TYPES.get(status, default)


def _message(error: MillstreamError) -> str:
    if isinstance(error, ContextOverflow):
        # Agents know these words, and then shorten the conversation.
        if error.tokens is None or error.limit is None:
            return f"prompt is too long: {told(error)}"
        return f"prompt is too long: {error.tokens} tokens > {error.limit - 1} maximum"
    # The shape has no field for the parameter, so the message has to name it.
    message = told(error)
    return message if error.param is None or error.param in message else f"{error.param}: {message}"


ERROR_FORMAT = ErrorFormat(error_body, status=http_status)
