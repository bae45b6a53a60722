"""Errors in /openapi.json: the error object, and a response for each status that a route can answer with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from millstream.api.answer_schema import ABSENT, AnswerSchema
from millstream.errors import MillstreamError


class ErrorObject(AnswerSchema):
    """What went wrong, in OpenAI's shape."""

    message: str
    """For people: what was wrong, and what would be right."""
    type: str
    """The kind of error: invalid_request_error, authentication_error, permission_error or server_error."""
    param: str | None
    """The parameter that was wrong, if it was one, for example `messages[0].content`."""
    code: str | None
    """For programs. The codes of a status are in its description."""
    active: int = ABSENT
    """With engine_busy: requests that the model is answering."""
    waiting: int = ABSENT
    """With engine_busy: requests in its queue."""


class ErrorAnswer(AnswerSchema):
    """Every answer with a status of 400 or more. In a stream that has begun, the last event instead of `[DONE]`."""

    error: ErrorObject


_ANY_REQUEST = {
    400: "The request is wrong: `error.param` names the parameter, `error.message` says what would be right.",
    403: "The request comes from a page, a host or a machine that this server does not answer.",
    408: "The request took too long to arrive.",
    413: "The request body is over the server's limit.",
    414: "The request line is over the server's limit.",
    431: "The request headers are over the server's limits.",
    500: "The server or the model failed on this request.",
    503: "The server or the model cannot answer now: it is full, starting, restarting or stopping.",
}
_SERVICE = {
    404: "There is no such model here. /v1/models lists those there are.",
    409: "The request was given up because another request changed the model's state, such as an unload during a load.",
    507: "The model does not fit into the server's memory budget.",
}
_KEYED = {401: "The API key is missing or wrong."}
_STATUSES = dict(sorted((_ANY_REQUEST | _SERVICE | _KEYED).items()))

ANY_REQUEST = frozenset(_ANY_REQUEST)
"""Statuses that any route may answer with: what stands around all of them can refuse or fail."""
SERVICE = ANY_REQUEST | _SERVICE.keys()
"""Statuses of routes that ask the service to do something with a model."""
KEYED = frozenset(_KEYED)
"""Statuses of routes that want a key, on a server that has keys."""

_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"description": "`Bearer`.", "schema": {"type": "string"}}},
    503: {
        "Retry-After": {
            "description": "Seconds to wait before the next try, where that is known.",
            "schema": {"type": "integer", "minimum": 0},
        }
    },
}


def error_references(statuses: Iterable[int]) -> dict[str, dict[str, str]]:
    """The `responses` of an operation that can fail with these."""
    return {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in sorted(statuses)}


def error_responses() -> dict[str, Any]:
    """What `error_references` refers to: `components.responses`."""
    return {f"Error{status}": _response(status, text) for status, text in _STATUSES.items()}


def error_content() -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}


def _response(status: int, text: str) -> dict[str, Any]:
    known = sorted({error.code for error in error_classes() if error.status == status})
    codes = f" Codes: {', '.join(f'`{code}`' for code in known)}." if known else ""
    response: dict[str, Any] = {"description": text + codes, "content": error_content()}
    if status in _HEADERS:
        response["headers"] = _HEADERS[status]
    return response


def error_classes(base: type[MillstreamError] = MillstreamError) -> Iterator[type[MillstreamError]]:
    """All errors that are meant for clients."""
    yield base
    for child in base.__subclasses__():
        yield from error_classes(child)
