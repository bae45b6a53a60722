"""Request bodies: their size is limited as they arrive, then they are parsed as one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from anyio import to_thread
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.api.json_bounds import check_counts
from millstream.errors import BadRequest, Overloaded, TooLarge
from millstream.exact_json import deeper_than, dumps, loads_values, may_change

T = TypeVar("T")
_Model = TypeVar("_Model", bound=BaseModel)

MAX_DEPTH = 100
"""Levels of nesting. Far more than any request has, and far fewer than would exhaust the stack in a chat template."""
SMALL = 65_536
"""Largest body, in bytes, that is parsed on the event loop: at worst some ten milliseconds."""
IN_FLIGHT = 8
"""Largest total size of all bodies in memory, as a multiple of the limit of one."""
UPLOADS_IN_FLIGHT = 2
"""The same for uploads of files, whose limit is larger."""
FORM_OVERHEAD = 512 * 1024
"""Bytes of a form besides its file."""
RELEASE_BODY = "millstream.release_body"
"""Key of the ASGI scope: a function to call once nothing holds the body any more. Otherwise it counts as held until the
response has ended."""


@dataclass(slots=True)
class _Pool:
    """Bodies that share a limit."""

    limit: int
    total: int
    option: str
    held: int = 0

    def too_large(self) -> TooLarge:
        return TooLarge(f"The request body is larger than this server accepts ({self.limit} bytes; {self.option}).")


class BodyLimit:
    """Refuses a body over the limit: at once if its Content-Length says so, otherwise when a chunk exceeds it.

    The server drops the rest of such a body unread, so the connection can be reused. The bodies of all running requests
    together may take `IN_FLIGHT` times the limit; beyond that, requests are refused with a 503. Forms that upload a
    file to one of the `upload_paths` have limits of their own.
    """

    def __init__(self, app: ASGIApp, limit: int, upload_limit: int = 0, upload_paths: Collection[str] = ()) -> None:
        self._app = app
        self._bodies = _Pool(limit, IN_FLIGHT * limit, "--body-limit")
        upload_limit = upload_limit + FORM_OVERHEAD if upload_limit else limit
        self._uploads = _Pool(upload_limit, UPLOADS_IN_FLIGHT * upload_limit, "--audio-bytes")
        self._upload_paths = frozenset(upload_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        is_upload = scope["path"] in self._upload_paths and _is_form(headers)
        pool = self._uploads if is_upload else self._bodies
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > pool.limit:
            raise pool.too_large()
        received = held = 0

        async def limited() -> Message:
            nonlocal received, held
            message = await receive()
            size = len(message.get("body", b""))
            received += size
            held += size
            pool.held += size
            if received > pool.limit:
                raise pool.too_large()
            if pool.held > pool.total:
                raise Overloaded("The bodies of the running requests take too much memory. Try again in a moment.")
            return message

        def release() -> None:
            nonlocal held
            pool.held -= held
            held = 0

        scope[RELEASE_BODY] = release
        try:
            await self._app(scope, limited, send)
        finally:
            release()


def _is_form(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").lower().startswith(b"multipart/form-data")


async def read_body(request: Request, parse: Callable[[dict[str, object]], T]) -> T:
    """Parses the body as a JSON object and returns the result of `parse`. A large body is parsed on a thread, few at a
    time. The content type is ignored: people forget it, and JSON is all that we accept."""
    # Not `request.body()`, which keeps the body in memory until the response has ended.
    message = await request.receive()
    raw = _body(message)
    if message.get("more_body", False):
        chunks = [raw]
        while message.get("more_body", False):
            message = await request.receive()
            chunks.append(_body(message))
        raw = b"".join(chunks)
    if len(raw) <= SMALL:
        return parse(_small_object(raw, "request body"))
    return await parse_json(raw, parse)


def _body(message: Message) -> bytes:
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    body: bytes = message.get("body", b"")
    return body


async def parse_json(raw: bytes, parse: Callable[[dict[str, object]], T], what: str = "request body") -> T:
    """Like `read_body`, for an object that came in another way. `what` names it in errors."""
    if len(raw) <= SMALL:
        return parse(_small_object(raw, what))
    return await to_thread.run_sync(lambda: parse(_large_object(raw, what)))


def _small_object(raw: bytes, what: str) -> dict[str, object]:
    return _object(raw, raw.count(b"[") + raw.count(b"{"), may_change(raw), what)


def _large_object(raw: bytes, what: str) -> dict[str, object]:
    return _object(raw, *check_counts(raw), what)


def _object(raw: bytes, containers: int, changes: bool, what: str) -> dict[str, object]:
    """`containers` is an upper bound on the number of objects and lists. `changes`: the value of a number
    `may_change`."""
    if not raw:
        raise BadRequest(f"The {what} is empty; a JSON object was expected.")
    try:
        value = loads_values(raw, changes=changes)
    except orjson.JSONDecodeError as error:
        raise _invalid_json(raw, error, what) from error
    if not isinstance(value, dict):
        raise BadRequest(f"The {what} must be a JSON object, not {_quoted(value)}.")
    if containers > MAX_DEPTH and deeper_than(MAX_DEPTH, value):
        raise BadRequest(f"The {what} is nested deeper than {MAX_DEPTH} levels.")
    return value


def _invalid_json(raw: bytes, error: orjson.JSONDecodeError, what: str) -> BadRequest:
    try:
        raw.decode()
    except UnicodeDecodeError as bad:
        return BadRequest(f"The {what} is not valid UTF-8: {bad.reason} at byte {bad.start}.")
    return BadRequest(f"The {what} is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}).")


def validated(model: type[_Model], values: dict[str, object]) -> _Model:
    """Returns the values as a model. Raises `BadRequest` with a description of the first problem."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _described(error.errors(include_url=False)[0]) from error


def _described(problem: Mapping[str, Any]) -> BadRequest:
    path = path_of(problem["loc"])
    if problem["type"] == "missing":
        return BadRequest(f"{path} is required.", param=path)
    rule = _RULES.get(problem["type"], "is not valid").format(**problem.get("ctx", {}))
    return BadRequest(f"{path} {rule}, but {_quoted(problem['input'])} was sent.", param=path)


_RULES = {
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "must have at most {max_length} values",
}
"""Pydantic's error types that our schemas can raise, in terms of JSON."""


def path_of(location: tuple[int | str, ...]) -> str:
    """Formats `("messages", 2, "content")` as `messages[2].content`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _quoted(value: object) -> str:
    if isinstance(value, str):
        value = value[:60]
    elif isinstance(value, list | dict) and len(value) > 60:
        return "a list" if isinstance(value, list) else "an object"
    text = dumps(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."
