"""The errors that Millstream raises on purpose. Each knows its HTTP status and OpenAI code; nothing else is guessed.

MillstreamError
├── BadRequest             400  what the client sent is wrong
│   ├── UnsupportedParameter    a parameter that has a meaning and is not served
│   ├── UnknownParameter        a name that this server has never heard of: most likely a typing mistake
│   ├── MediaRefused            an image, sound or video that cannot be read or may not be fetched
│   └── ContextOverflow         the prompt does not fit the model
├── Unauthorized           401  the API key is missing or wrong
├── Forbidden              403  a page of another site
│   ├── HostNotAllowed          the Host header names another server
│   └── AdminNotAllowed         an admin route, without a key and from another machine
├── NotFound               404  no such model
├── RequestTimeout         408  headers or body came too slowly
├── LoadCancelled          409  the model was unloaded while this request waited for its load
├── TooLarge               413  the body is over the limit
├── UrlTooLong             414  the request line is over the limit
├── HeadersTooLarge        431  the headers are over the limit
├── OutputUnread           408  the client left too much of its answer unread
├── TooManyConnections     503  all connections are in use: try again later
├── EngineBusy             503  full: try again later
├── Overloaded             503  the server as a whole has too much in hand: try again later
├── NoRoom                 507  a model does not fit the memory budget
├── EngineGone             503  stopping, stopped or never loaded
├── StepFailed             500  the model failed while it ran this request
└── ModelError                  a model cannot be found, read or served (a start-up error for the command line)
"""

from __future__ import annotations


class MillstreamError(Exception):
    """Base of all. `message` is for the person who made the request."""

    status = 500
    code = "internal_error"
    kind = "server_error"
    retry_after: int | None = None
    """Seconds after which to try again; None where that will not help, or nobody knows."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(MillstreamError):
    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class WrongModelKind(BadRequest):
    """A request for something that the model does not do, such as a chat with an embedder."""

    code = "wrong_model_kind"


class UnsupportedParameter(BadRequest):
    code = "unsupported_parameter"


class UnknownParameter(BadRequest):
    code = "unknown_parameter"


class MediaRefused(BadRequest):
    code = "invalid_media"


class ContextOverflow(BadRequest):
    code = "context_length_exceeded"


class Unauthorized(MillstreamError):
    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class Forbidden(MillstreamError):
    status = 403
    code = "origin_not_allowed"
    kind = "permission_error"


class HostNotAllowed(Forbidden):
    code = "host_not_allowed"


class AdminNotAllowed(Forbidden):
    code = "admin_not_allowed"


class NotFound(MillstreamError):
    status = 404
    code = "model_not_found"
    kind = "invalid_request_error"


class RequestTimeout(MillstreamError):
    status = 408
    code = "request_timeout"
    kind = "invalid_request_error"


class LoadCancelled(MillstreamError):
    status = 409
    code = "load_cancelled"
    kind = "invalid_request_error"


class TooLarge(MillstreamError):
    status = 413
    code = "request_too_large"
    kind = "invalid_request_error"


class UrlTooLong(MillstreamError):
    status = 414
    code = "url_too_long"
    kind = "invalid_request_error"


class HeadersTooLarge(MillstreamError):
    status = 431
    code = "headers_too_large"
    kind = "invalid_request_error"


class OutputUnread(MillstreamError):
    status = 408
    code = "output_unread"
    kind = "invalid_request_error"


class TooManyConnections(MillstreamError):
    status = 503
    code = "too_many_connections"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineBusy(MillstreamError):
    status = 503
    code = "engine_busy"

    def __init__(self, message: str, *, active: int, waiting: int, retry_after: int) -> None:
        super().__init__(message)
        self.active = active
        self.waiting = waiting
        self.retry_after = retry_after


class Overloaded(MillstreamError):
    status = 503
    code = "server_overloaded"
    retry_after = 1


class NoRoom(MillstreamError):
    status = 507
    code = "insufficient_memory"


class EngineGone(MillstreamError):
    """An engine that died is started again: `retry_after` is in seconds. None where trying again will not help."""

    status = 503
    code = "engine_unavailable"

    def __init__(self, message: str, *, retry_after: int | None = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StepFailed(MillstreamError):
    status = 500
    code = "engine_error"


class ModelError(MillstreamError):
    status = 500
    code = "model_error"
