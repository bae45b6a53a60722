"""/openapi.json and /docs. The routes read their bodies and render their answers themselves, so FastAPI has to be told
what they take and give: each route says so with `documented`, and `DocumentedApp` joins it into one document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from millstream.api.auth import OPEN_PATH
from millstream.api.error_docs import KEYED, ErrorAnswer, error_references, error_responses

_REF = "#/components/schemas/{model}"
_JSON = "application/json"

_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`, as OpenAI has it."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "`x-api-key: KEY`."},
}


def reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def documented(
    answer: type[BaseModel] | Mapping[str, Any],
    description: str,
    *,
    errors: Iterable[int],
    body: type[BaseModel] | None = None,
    examples: Mapping[str, Any] | None = None,
    events: type[BaseModel] | None = None,
) -> dict[str, Any]:
    """The `openapi_extra` of a route: its answer, a model or the content by media type; the statuses of its errors; the
    body that it takes, with examples; and what a chunk is, if it streams."""
    content = {_JSON: {"schema": reference(answer)}} if isinstance(answer, type) else dict(answer)
    if events is not None:
        content["text/event-stream"] = {"schema": _event(events)}
    responses = {"200": {"description": description, "content": content}, **error_references(errors)}
    operation: dict[str, Any] = {"responses": responses}
    if body is not None:
        taken = {"schema": reference(body), "examples": dict(examples or {})}
        operation["requestBody"] = {"required": True, "content": {_JSON: taken}}
    return operation


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """Of each event, as OpenAPI 3.1 has it."""
    payload = {"anyOf": [reference(chunk), reference(ErrorAnswer)]}
    json_text = {"type": "string", "contentMediaType": _JSON, "contentSchema": payload}
    return {
        "title": f"{chunk.__name__}Event",
        "description": (
            "One server-sent event: a `data:` line and an empty line. Its data is a chunk as JSON, or `[DONE]`, which "
            "ends every complete stream. A failure after the first event is an event with an `error` field, and no "
            "`[DONE]` follows. A line that begins with a colon is a comment, sent to keep a silent connection open."
        ),
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [json_text, {"const": "[DONE]"}]}},
    }


class DocumentedApp(FastAPI):
    """A FastAPI app whose document holds the models that `documented` refers to. It is made once, at the first request
    for it. With `keyed`, it says that the API wants a key."""

    def __init__(
        self, *, bodies: Iterable[type[BaseModel]], answers: Iterable[type[BaseModel]], keyed: bool, **options: Any
    ) -> None:
        self._models: list[tuple[type[BaseModel], JsonSchemaMode]] = [
            *((body, "validation") for body in bodies),
            *((answer, "serialization") for answer in answers),
            (ErrorAnswer, "serialization"),
        ]
        self._keyed = keyed
        self._rendered: bytes | None = None
        super().__init__(generate_unique_id_function=_operation_id, **options)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = self._joined(super().openapi())
        return self.openapi_schema

    def setup(self) -> None:
        """FastAPI would write the document again for each request; the route that is added first counts."""
        assert self.openapi_url is not None
        self.add_route(self.openapi_url, self._send_document, include_in_schema=False)
        super().setup()

    async def _send_document(self, request: Request) -> Response:
        if self._rendered is None:  # off the event loop: it takes a tenth of a second
            self._rendered = await run_in_threadpool(lambda: orjson.dumps(self.openapi()))
        return Response(self._rendered, media_type=_JSON)

    def _joined(self, page: dict[str, Any]) -> dict[str, Any]:
        _, schema = models_json_schema(self._models, ref_template=_REF)
        page["components"] = {"responses": error_responses()}
        for path, methods in page["paths"].items():
            for operation in methods.values():
                self._mend(operation, is_open=path == OPEN_PATH)
        if self._keyed:
            page["components"]["securitySchemes"] = _SECURITY_SCHEMES
            page["security"] = [{name: []} for name in _SECURITY_SCHEMES]
        else:
            del page["components"]["responses"]["Error401"]
        # FastAPI's own schemas are those of its validation errors, which no route of ours gives.
        page["components"]["schemas"] = _reachable(page, schema["$defs"])
        return page

    def _mend(self, operation: dict[str, Any], *, is_open: bool) -> None:
        operation["responses"].pop("422", None)
        if self._keyed and is_open:
            operation["security"] = []
        elif self._keyed:
            operation["responses"] |= error_references(KEYED)
        operation["responses"] = dict(sorted(operation["responses"].items()))


def _reachable(page: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas that the page refers to. Pydantic also lists those of fields whose schema we wrote ourselves."""
    found: set[str] = set()
    new = _names(page)
    while new:
        found |= new
        new = {name for known in new for name in _names(schemas[known])} - found
    return {name: schemas[name] for name in sorted(found)}


def _names(part: object) -> set[str]:
    return set(re.findall(r'"#/components/schemas/(\w+)"', orjson.dumps(part).decode()))


def _operation_id(route: APIRoute) -> str:
    return route.name
