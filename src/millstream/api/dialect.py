"""What makes a dialect: its routes, its error format, its documentation, and the requests that belong to it.

A dialect is an API that clients already speak, such as OpenAI's. Each lives in a folder of its own, and `app.py`
registers it. The common code finds the dialect of a request here: an error may occur before a route is known, and
has to be written in the format that the client understands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.types import Scope

from millstream.api.error_docs import ErrorDocs
from millstream.api.errors import ErrorFormat
from millstream.api.response import Responder

KNOWN_PATHS = 256
"""Paths whose dialect is remembered. There are fewer, but clients may ask for any."""


@dataclass(frozen=True, slots=True)
class DialectDocs:
    """What a dialect adds to /openapi.json."""

    errors: ErrorDocs
    bodies: tuple[type[BaseModel], ...] = ()
    """Models of request bodies."""
    responses: tuple[type[BaseModel], ...] = ()
    """Models of responses and of the chunks of a stream."""
    tags: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One dialect, as data and functions. It has no state: its routes get what they need from the app."""

    name: str
    routes: Callable[[Responder], Iterable[APIRouter]]
    shared_routes: Callable[[Responder], Iterable[APIRouter]] = lambda responder: ()
    """Routes at paths of the default dialect. They must match only requests with the `header`: they are tried first."""
    errors: ErrorFormat
    docs: DialectDocs
    paths: tuple[str, ...] = ()
    """Requests to these paths, and to paths below them, belong to the dialect."""
    header: bytes | None = None
    """On any other path, requests with this header belong to it as well. In lower case."""
    upload_paths: tuple[str, ...] = ()
    """Paths that take forms with large files."""
    admin_paths: tuple[re.Pattern[str], ...] = ()
    """Routes that change the server itself. Without API keys, only clients on this machine may use them."""

    def has_path(self, path: str) -> bool:
        return any(path == own or path.startswith(f"{own}/") for own in self.paths)


class Dialects:
    """All dialects of an app. The first is the default: it gets the requests that no dialect claims."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self.default = dialects[0]
        self.all = tuple(dialects)

        self._with_path = lru_cache(KNOWN_PATHS)(self._find_path)

    def of(self, scope: Scope) -> Dialect:
        """Returns the dialect of a request. A path counts before a header."""
        named = self._with_path(scope["path"])
        return named or self._with_header(scope) or self.default

    def of_path(self, path: str) -> Dialect:
        return self._with_path(path) or self.default

    def routers(self, responder: Responder) -> list[APIRouter]:
        """All routers in the order in which they are tried. Each route that is tried takes time, so the default dialect
        comes before the others, and after routes that share its paths."""
        shared = [router for dialect in self.all for router in dialect.shared_routes(responder)]
        return [*shared, *(router for dialect in self.all for router in dialect.routes(responder))]

    def _find_path(self, path: str) -> Dialect | None:
        return next((dialect for dialect in self.all if dialect.has_path(path)), None)

    def _with_header(self, scope: Scope) -> Dialect | None:
        sent = {name for name, _ in scope["headers"]}
        return next((dialect for dialect in self.all if dialect.header in sent), None)
