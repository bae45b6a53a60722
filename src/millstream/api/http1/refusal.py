"""Error responses for requests that never reach the application, as bytes on the wire."""

from __future__ import annotations

from http import HTTPStatus

from millstream.api.errors import ErrorFormat
from millstream.api.request_id import HEADERS, new_request_id
from millstream.errors import MillstreamError


def refusal(error: MillstreamError, form: ErrorFormat) -> bytes:
    """Returns a complete response, which closes its connection."""
    request_id = error.request_id = new_request_id()
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
