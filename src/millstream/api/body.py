"""Request bodies: held to a size as they arrive, then read as one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import orjson
from anyio import to_thread
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.api.json_bounds import check_counts
from millstream.errors import BadRequest, Overloaded, TooLarge

T = TypeVar("T")
_Model = TypeVar("_Model", bound=BaseModel)

MAX_DEPTH = 100
"""Levels of nesting. Far above any request and far below what would exhaust the stack in a template later on."""
SMALL = 65_536
"""Bytes of a body that is parsed on the event loop: at worst some ten milliseconds."""
IN_FLIGHT = 8


class BodyLimit:
    """Refuses a body over the limit: from its Content-Length at once, else as soon as a chunk passes the limit.

    The rest of such a body is never kept. The server drops it unread, so the connection can be used again. All bodies
    of requests that are under way together may take `IN_FLIGHT` times the limit; what comes then is told to wait.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit:
            raise self._too_large()
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            size = len(message.get("body", b""))
            seen += size
            self._held += size
            if seen > self._limit:
                raise self._too_large()
            if self._held > IN_FLIGHT * self._limit:
                raise Overloaded("The bodies of the requests under way take too much memory. Try again in a moment.")
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._held -= seen

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The request body is larger than this server takes ({self._limit} bytes; --body-limit).")


async def read_body(request: Request, parse: Callable[[dict[str, object]], T]) -> T:
    """What `parse` makes of the body, a JSON object. Its content type is not looked at: people forget it, and we take
    nothing else. A large one is parsed on a thread, few at a time."""
    # Not `request.body()`: that one keeps all of it for as long as the answer takes.
    raw = b"".join([chunk async for chunk in request.stream()])
    if len(raw) <= SMALL:
        return parse(_object(raw, raw.count(b"[") + raw.count(b"{")))
    return await to_thread.run_sync(lambda: parse(_large_object(raw)))


def _large_object(raw: bytes) -> dict[str, object]:
    return _object(raw, check_counts(raw))


def _object(raw: bytes, containers: int) -> dict[str, object]:
    """`containers`: at least as many objects and lists as there are."""
    if not raw:
        raise BadRequest("The request body is empty; a JSON object was expected.")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _no_json(raw, error) from error
    if not isinstance(value, dict):
        raise BadRequest(f"The request body must be a JSON object, not {_sent(value)}.")
    if containers > MAX_DEPTH and _deeper_than(MAX_DEPTH, value):
        raise BadRequest(f"The request body is nested deeper than {MAX_DEPTH} levels.")
    return value


def _no_json(raw: bytes, error: orjson.JSONDecodeError) -> BadRequest:
    try:
        raw.decode()
    except UnicodeDecodeError as bad:
        return BadRequest(f"The request body is not valid UTF-8: {bad.reason} at byte {bad.start}.")
    return BadRequest(f"The request body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}).")


def _deeper_than(limit: int, value: object) -> bool:
    """Level by level and without recursion: the input is hostile here."""
    level = [value]
    for _ in range(limit):
        children = [child for node in level for child in _children(node)]
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(node: object) -> Iterable[object]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def validated(model: type[_Model], values: dict[str, object]) -> _Model:
    """The values as a model, or a `BadRequest` that tells the first problem in words."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _in_words(error.errors(include_url=False)[0]) from error


def _in_words(problem: Mapping[str, Any]) -> BadRequest:
    path = path_of(problem["loc"])
    if problem["type"] == "missing":
        return BadRequest(f"{path} is required.", param=path)
    rule = _RULES.get(problem["type"], "is not valid").format(**problem.get("ctx", {}))
    return BadRequest(f"{path} {rule}, but {_sent(problem['input'])} was sent.", param=path)


_RULES = {
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "list_type": "must be a list",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
}
"""Pydantic's error types that our schemas can raise, in the words of someone who sends JSON."""


def path_of(location: tuple[int | str, ...]) -> str:
    """`("messages", 2, "content")` as `messages[2].content`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _sent(value: object) -> str:
    if isinstance(value, str):
        value = value[:60]
    elif isinstance(value, list | dict) and len(value) > 60:
        return "a list" if isinstance(value, list) else "an object"
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."
