"""Exceptions that Millstream raises on purpose. Each class carries the HTTP status and error code that clients see.

The tree, with the status of each class. A class without one has its parent's:

    MillstreamError               500
    ├── BadRequest                400
    │   ├── UnsupportedParameter
    │   ├── UnknownParameter
    │   ├── MediaRefused
    │   ├── SessionStateError
    │   │   ├── AudioBufferEmpty
    │   │   ├── AudioBufferFull
    │   │   ├── ResponseActive
    │   │   └── NoActiveResponse
    │   └── ContextOverflow
    ├── Unauthorized              401
    ├── Forbidden                 403
    │   ├── HostNotAllowed
    │   └── AdminNotAllowed
    ├── NotFound                  404
    │   ├── ItemNotFound
    │   ├── ResponseNotFound
    │   └── PreviousResponseNotFound
    ├── RequestTimeout            408
    ├── OutputUnread              408
    ├── LoadCancelled             409
    ├── TooLarge                  413
    ├── UrlTooLong                414
    ├── HeadersTooLarge           431
    ├── StepFailed                500
    ├── ModelError                500
    │   └── EngineDied
    │       └── DeviceLost
    ├── ToolServerFailed          502
    ├── TooManyConnections        503
    ├── EngineBusy                503
    ├── Overloaded                503
    ├── EngineGone                503
    └── InsufficientMemory        507

The API renders `status`, `code` and `kind`, and never derives them from the text of a message.
"""

from __future__ import annotations


class MillstreamError(Exception):
    """Base class of all errors. `message` is written for the person who sent the request."""

    status = 500
    code = "internal_error"
    kind = "server_error"
    retry_after: int | None = None
    """Seconds to wait before a retry; None if a retry will not help or the time is unknown."""
    request_id: str | None = None
    """The id of the request that failed, once the edge has set it."""
    quotes_input = False
    """True if the message may quote what the client sent. See `log_reason`."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def log_reason(self) -> str:
        """What the log may say: the message, or the code and the parameter if the message may quote the client."""
        if not self.quotes_input:
            return self.message
        return self.code if self.param is None else f"{self.code} ({self.param})"


class BadRequest(MillstreamError):
    """The request is invalid (400)."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"
    quotes_input = True


class WrongModelKind(BadRequest):
    """A request for something that the model does not do, such as a chat with an embedder."""

    code = "wrong_model_kind"
    quotes_input = False


class UnsupportedParameter(BadRequest):
    """A parameter is known, but this server does not support it (400)."""

    code = "unsupported_parameter"


class UnknownParameter(BadRequest):
    """A parameter does not exist in this API; most likely its name is misspelled (400)."""

    code = "unknown_parameter"


class MediaRefused(BadRequest):
    """An image, audio or video input cannot be decoded, or its URL may not be fetched (400)."""

    code = "invalid_media"


class SessionStateError(BadRequest):
    """A realtime session cannot do this, or not now (400)."""

    code = "invalid_session_state"
    quotes_input = False


class AudioBufferEmpty(SessionStateError):
    """There is too little audio to commit."""

    code = "input_audio_buffer_commit_empty"


class AudioBufferFull(SessionStateError):
    """More audio waits for a commit than a session may hold."""

    code = "input_audio_buffer_full"


class ResponseActive(SessionStateError):
    """A response runs already."""

    code = "conversation_already_has_active_response"


class NoActiveResponse(SessionStateError):
    """There is no response to cancel."""

    code = "response_cancel_not_active"


class ContextOverflow(BadRequest):
    """The prompt is longer than the model's context (400). `tokens` is its length if known, `limit` the context."""

    code = "context_length_exceeded"
    quotes_input = False

    def __init__(
        self, message: str, *, tokens: int | None = None, limit: int | None = None, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit


class Unauthorized(MillstreamError):
    """The API key is missing or wrong (401)."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class Forbidden(MillstreamError):
    """A web page of another origin sent the request (403)."""

    status = 403
    code = "origin_not_allowed"
    kind = "permission_error"


class HostNotAllowed(Forbidden):
    """The `Host` header names another server (403)."""

    code = "host_not_allowed"


class AdminNotAllowed(Forbidden):
    """An admin route was called without an API key from another machine (403)."""

    code = "admin_not_allowed"


class NotFound(MillstreamError):
    """The model does not exist (404)."""

    status = 404
    code = "model_not_found"
    kind = "invalid_request_error"


class ItemNotFound(NotFound):
    """A realtime conversation has no such item (404)."""

    code = "item_not_found"


class ResponseNotFound(NotFound):
    """There is no such stored response (404): it was never stored, was deleted, or gave way to others."""

    code = "response_not_found"


class PreviousResponseNotFound(NotFound):
    """The response to be continued is not stored, or one before it is not (404)."""

    code = "previous_response_not_found"


class RequestTimeout(MillstreamError):
    """The headers or the body arrived too slowly (408)."""

    status = 408
    code = "request_timeout"
    kind = "invalid_request_error"


class LoadCancelled(MillstreamError):
    """The model was unloaded while the request waited for it to load (409)."""

    status = 409
    code = "load_cancelled"
    kind = "invalid_request_error"


class TooLarge(MillstreamError):
    """The request body exceeds the size limit (413)."""

    status = 413
    code = "request_too_large"
    kind = "invalid_request_error"


class UrlTooLong(MillstreamError):
    """The request line exceeds the size limit (414)."""

    status = 414
    code = "url_too_long"
    kind = "invalid_request_error"


class HeadersTooLarge(MillstreamError):
    """The request headers exceed the size limit (431)."""

    status = 431
    code = "headers_too_large"
    kind = "invalid_request_error"


class OutputUnread(MillstreamError):
    """The client reads its response too slowly, so the request was ended (408)."""

    status = 408
    code = "output_unread"
    kind = "invalid_request_error"


class TooManyConnections(MillstreamError):
    """All connections are in use; the client may retry (503)."""

    status = 503
    code = "too_many_connections"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineBusy(MillstreamError):
    """The model's queue is full; the client may retry (503)."""

    status = 503
    code = "engine_busy"

    def __init__(self, message: str, *, active: int, waiting: int, retry_after: int) -> None:
        super().__init__(message)
        self.active = active
        self.waiting = waiting
        self.retry_after = retry_after


class Overloaded(MillstreamError):
    """The server as a whole holds too much work; the client may retry (503)."""

    status = 503
    code = "server_overloaded"
    retry_after = 1


class InsufficientMemory(MillstreamError):
    """The model does not fit the memory budget (507)."""

    status = 507
    code = "insufficient_memory"


class EngineGone(MillstreamError):
    """The engine has stopped, is stopping or was never loaded (503).

    An engine that died restarts, so clients may retry after `retry_after` seconds; None if a retry will not help.
    """

    status = 503
    code = "engine_unavailable"

    def __init__(self, message: str, *, retry_after: int | None = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StepFailed(MillstreamError):
    """The engine failed while it ran this request (500)."""

    status = 500
    code = "engine_error"


class ToolServerFailed(MillstreamError):
    """An MCP server cannot be started or reached, or does not answer (502)."""

    status = 502
    code = "tool_server_failed"


class ModelError(MillstreamError):
    """A model cannot be found, read or served (500). The command line reports it as a start-up error."""

    status = 500
    code = "model_error"


class EngineDied(ModelError):
    """The engine's process ended without a word while it loaded a model, as when memory runs out (500). The model
    may be fine: it is loaded again, a few times."""


class DeviceLost(EngineDied):
    """A GPU failed while a model was loaded (500). It refuses all further work of that process; another process may
    load the model without the fast path that failed."""
