"""Errors as HTTP responses: status and headers are common to all dialects, the body belongs to one."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from starlette.responses import Response

from millstream.errors import MillstreamError, Unauthorized
from millstream.exact_json import dumps

JSON_TYPE = "application/json"
MESSAGE_LENGTH = 2000
PARAM_LENGTH = 200
"""Characters. An error may quote what the client sent, but never all of a long text."""

REQUEST_ID = "millstream.request_id"
"""Key of the ASGI scope: the id of the request, where there is one."""

DISCONNECTED = "millstream.disconnected"
"""Key of the ASGI scope of a WebSocket: an event that is set when its connection is lost."""

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def shortened(text: str, length: int) -> str:
    """Returns the beginning and the end of a long text."""
    return text if len(text) <= length else f"{text[: length * 2 // 3]}…{text[-(length // 3) :]}"


_PATH = re.compile(
    r"""(?P<quote>['"])(?P<quoted>/[^'"\n]+/[^'"\n]*)(?P=quote)"""  # may hold spaces
    r"""|(?<![\w.:/~-])/(?:[^\s/'",;:()]+/)+[^\s/'",;:()]*"""
)
_ROUTES = frozenset({"v1", "api"})


def told(error: MillstreamError) -> str:
    """What a client is told of an error. Unless it is about what the client sent, the message may come from any
    library: it keeps the names of files, but not where they are on this machine."""
    return shortened(error.message if error.quotes_input else without_paths(error.message), MESSAGE_LENGTH)


def without_paths(text: str) -> str:
    """Leaves the last part of each path of this machine."""
    return _PATH.sub(_last_part, text)


def _last_part(found: re.Match[str]) -> str:
    quote, path = found["quote"] or "", found["quoted"] or found[0]
    first = path.split("/", 2)[1]
    return f"{quote}{path.rstrip('/').rpartition('/')[2]}{quote}" if _is_folder(first) else found[0]


@functools.lru_cache
def _is_folder(first: str) -> bool:
    """Else it is no path of this machine, but one of the server's routes or the like."""
    return first not in _ROUTES and os.path.isdir(f"/{first}")


def printable(text: str) -> str:
    """Returns a client's text for one line of the log: shortened, with unprintable characters escaped."""
    text = shortened(text, PARAM_LENGTH)
    return text if text.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def error_headers(error: MillstreamError) -> dict[str, str]:
    if error.retry_after is not None:
        return {"retry-after": str(error.retry_after)}
    return {"www-authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}


def error_status(error: MillstreamError) -> int:
    return error.status


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a dialect writes an error that is a whole response."""

    body: Callable[[MillstreamError], bytes]
    headers: Callable[[MillstreamError], dict[str, str]] = error_headers
    media_type: str = JSON_TYPE
    status: Callable[[MillstreamError], int] = error_status

    def response(self, error: MillstreamError, headers: Mapping[str, str] = _NO_HEADERS) -> Response:
        return Response(
            self.body(error),
            status_code=self.status(error),
            headers={**self.headers(error), **headers},
            media_type=self.media_type,
        )


def json_response(value: object, *, status: int = 200) -> Response:
    return Response(dumps(value), status_code=status, media_type=JSON_TYPE)
