"""Errors in OpenAI's shape, the same in a plain response and inside a stream."""

from __future__ import annotations

import orjson

from millstream.api.errors import PARAM_LENGTH, shortened, told
from millstream.api.response_schema import ABSENT, ResponseSchema
from millstream.errors import EngineBusy, MillstreamError


class ErrorObject(ResponseSchema):
    """What went wrong, in OpenAI's shape."""

    message: str
    """For people: what was wrong, and what would be right."""
    type: str
    """The kind of error: invalid_request_error, authentication_error, permission_error or server_error."""
    param: str | None
    """The parameter that was wrong, if any, for example `messages[0].content`."""
    code: str | None
    """For programs. The description of each status lists its codes."""
    active: int = ABSENT
    """With engine_busy: requests that the model is running."""
    waiting: int = ABSENT
    """With engine_busy: requests in its queue."""
    request_id: str | None
    """The id in the `x-request-id` header, which the server's log names too."""


class ErrorResponse(ResponseSchema):
    """The body of every response with a status of 400 or more. In a stream that has begun, it is the last event, in
    place of `[DONE]`."""

    error: ErrorObject


def error_body(error: MillstreamError) -> bytes:
    fields: dict[str, object] = {
        "message": told(error),
        "type": error.kind,
        "param": None if error.param is None else shortened(error.param, PARAM_LENGTH),
        "code": error.code,
    }
    fields["request_id"] = error.request_id
    if isinstance(error, EngineBusy):
        fields |= {"active": error.active, "waiting": error.waiting}
    return orjson.dumps({"error": fields})
