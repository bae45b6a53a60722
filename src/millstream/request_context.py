"""What is known of an HTTP request wherever it is worked on: its id, its dialect, its path, its trace.

A context variable, so that a log line anywhere in the task of a request can name the request. Tasks that the request
starts inherit it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def in_request(context: RequestContext) -> Iterator[RequestContext]:
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)
