"""Answers for requests that never reach the application: OpenAI's error shape, as bytes on the wire."""

from __future__ import annotations

from http import HTTPStatus

import orjson

from millstream.api.errors import JSON_TYPE, error_body, error_headers
from millstream.errors import MillstreamError


def refusal(error: MillstreamError) -> bytes:
    """A whole response that ends its connection."""
    body = orjson.dumps(error_body(error))
    headers = {
        "content-type": JSON_TYPE,
        "content-length": str(len(body)),
        "connection": "close",
        **error_headers(error),
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
