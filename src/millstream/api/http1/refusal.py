"""Error responses for requests that never reach the application, as bytes on the wire."""

from __future__ import annotations

import logging
from http import HTTPStatus

from millstream.api.errors import ErrorFormat, printable
from millstream.api.request_id import HEADERS, new_request_id
from millstream.errors import MillstreamError, TooManyConnections

log = logging.getLogger(__name__)


def refusal(error: MillstreamError, form: ErrorFormat) -> bytes:
    """Returns a complete response, which closes its connection."""
    request_id = error.request_id = new_request_id()
    if not isinstance(error, TooManyConnections):  # `connections.py` counts those: one line each would flood the log
        reason = printable(error.log_reason)
        fields = {
            "event": "request",
            "request_id": request_id,
            "outcome": "failed",
            "status": error.status,
            "code": error.code,
            "error": reason,
        }
        log.info("%s: refused with %d, %s", request_id, error.status, reason, extra={"fields": fields})
    body = form.body(error)
    headers = {
        "content-type": form.media_type,
        "content-length": str(len(body)),
        "connection": "close",
        **form.headers(error),
    }
    headers |= {name.decode("ascii"): request_id for name in HEADERS}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
