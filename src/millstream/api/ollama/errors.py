"""Errors in Ollama's shape: one string, the same in a plain response and as the last line of a stream."""

from __future__ import annotations

import orjson

from millstream.api.errors import MESSAGE_LENGTH, PARAM_LENGTH, shortened, told
from millstream.api.response_schema import ResponseSchema
from millstream.errors import MillstreamError


class OllamaError(ResponseSchema):
    """The body of every response with a status of 400 or more. In a stream that has begun, it is the last line."""

    error: str
    """What was wrong, and what would be right. Names the field, if there is one."""


def error_body(error: MillstreamError) -> bytes:
    """The shape has no place for the field, so the message names it."""
    message = told(error)
    if error.param is not None and error.param not in message:
        message = f"{shortened(error.param, PARAM_LENGTH)}: {message}"
    return orjson.dumps({"error": shortened(message, MESSAGE_LENGTH)})
