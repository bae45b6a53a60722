"""Errors in /openapi.json: one response per status that a route can return, with the error schema of its dialect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from millstream.errors import MillstreamError

_ANY_REQUEST = {
    400: "The request is invalid. The message says what would be right.",
    403: "This server does not accept requests from this page, for this host or from this machine.",
    408: "The request took too long to arrive.",
    413: "The request body is larger than the server's limit.",
    414: "The request line is longer than the server's limit.",
    431: "The request headers exceed the server's limits.",
    500: "The server or the model failed on this request.",
    503: "The server or the model is not available now: it is full, starting, restarting or stopping.",
}
_SERVICE = {
    404: "No such model, or no such stored response. /v1/models lists the models of this server.",
    409: "Another request changed the state of the model meanwhile, for example an unload during a load.",
    502: "A tool server (MCP) of the configuration file cannot be reached.",
    507: "The model does not fit into the server's memory budget.",
}
_KEYED = {401: "The API key is missing or wrong."}
_STATUSES = dict(sorted((_ANY_REQUEST | _SERVICE | _KEYED).items()))

ANY_REQUEST = frozenset(_ANY_REQUEST)
"""Statuses that any route may return, because the middleware around all routes can refuse or fail."""
SERVICE = ANY_REQUEST | _SERVICE.keys()
"""Statuses of routes that ask the service to do something with a model."""
KEYED = frozenset(_KEYED)
"""Statuses of routes that need an API key, on a server that has keys."""

_RETRY_AFTER: dict[str, Any] = {
    "Retry-After": {
        "description": "Seconds to wait before the next attempt, if known.",
        "schema": {"type": "integer", "minimum": 0},
    }
}
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"description": "`Bearer`.", "schema": {"type": "string"}}},
    503: _RETRY_AFTER,
    529: _RETRY_AFTER,
}


@dataclass(frozen=True, slots=True)
class ErrorDocs:
    """The error responses of one dialect."""

    schema: type[BaseModel]
    """The body of an error. Its class name must differ from those of other dialects."""
    prefix: str = ""
    """Of the names in `components.responses`. Must differ from those of other dialects."""
    codes: bool = True
    """Whether the body of an error holds its code, so that the codes are worth listing."""
    own: tuple[tuple[int, str], ...] = ()
    """Statuses that only this dialect has, each with its description."""

    def references(self, statuses: Iterable[int]) -> dict[str, dict[str, str]]:
        """The `responses` of an operation that can fail with these statuses."""
        return {str(status): {"$ref": f"#/components/responses/{self._name(status)}"} for status in sorted(statuses)}

    def responses(self, *, keyed: bool) -> dict[str, Any]:
        """The entries of `components.responses` that `references` refers to."""
        listed = {status: text for status, text in _STATUSES.items() if keyed or status not in KEYED} | dict(self.own)
        return {self._name(status): self._response(status, text) for status, text in listed.items()}

    def _name(self, status: int) -> str:
        return f"{self.prefix}Error{status}"

    def _response(self, status: int, text: str) -> dict[str, Any]:
        known = sorted({error.code for error in error_classes() if self.codes and error.status == status})
        codes = f" Codes: {', '.join(f'`{code}`' for code in known)}." if known else ""
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{self.schema.__name__}"}}}
        response: dict[str, Any] = {"description": text + codes, "content": content}
        if status in _HEADERS:
            response["headers"] = _HEADERS[status]
        return response


def error_classes(base: type[MillstreamError] = MillstreamError) -> Iterator[type[MillstreamError]]:
    """All errors that are meant for clients."""
    yield base
    for child in base.__subclasses__():
        yield from error_classes(child)
