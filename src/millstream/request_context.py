"""What is known of an HTTP request wherever it is worked on: its id, its dialect, its path, its trace.

A context variable, so that a log line anywhere in the task of a request can name the request. Tasks that the request
starts inherit it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestContext:
    request_id: str
    dialect: str
    """The name of the API that the client speaks."""
    endpoint: str
    """The path of the URL."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """The W3C headers `traceparent` and `tracestate`, as far as the client sent them."""
    reported: int | None = None
    """The `id` of the error that the log has already told of, so that the edge does not tell it twice. Not the error:
    its traceback holds all that the request held."""


_CURRENT: ContextVar[RequestContext | None] = ContextVar("millstream_request", default=None)


def current_request() -> RequestContext | None:
    """None outside of a request."""
    return _CURRENT.get()


class in_request:
    """In the block, and in tasks that it starts, `current_request` is this one."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    def __enter__(self) -> RequestContext:
        self._token = _CURRENT.set(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)
