"""The log line of a request that failed before any model saw it. The service's journal logs all others."""

from __future__ import annotations

import logging

from millstream.api.errors import printable
from millstream.errors import EngineBusy, MillstreamError, Overloaded
from millstream.request_context import current_request

log = logging.getLogger(__name__)


def log_error(method: str, error: MillstreamError) -> None:
    """Call it in the context of the request."""
    context = current_request()
    assert context is not None
    # A full queue is no fault of the server.
    level = logging.WARNING if error.status >= 500 and not isinstance(error, EngineBusy | Overloaded) else logging.INFO
    if not log.isEnabledFor(level):
        return
    reason = printable(error.log_reason)
    fields = {
        "event": "request",
        "request_id": context.request_id,
        "dialect": context.dialect,
        "endpoint": context.endpoint,
        "method": method,
        "outcome": "failed",
        "status": error.status,
        "code": error.code,
        "error": reason,
    }
    verb = "failed" if level == logging.WARNING else "refused"
    log.log(
        level,
        "%s %s %s %s: %s with %d, %s",
        context.request_id,
        context.dialect,
        printable(method),
        context.endpoint,
        verb,
        error.status,
        reason,
        extra={"fields": fields},
    )
