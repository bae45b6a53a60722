"""/openapi.json, which the page at /docs shows.

The routes parse their bodies and render their responses themselves, so FastAPI cannot know what they accept and return:
each route describes it with `documented`, and `DocumentedApp` joins the parts into one document.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import orjson
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.api.auth import OPEN_PATH
from millstream.api.dialect import Dialects
from millstream.api.error_docs import KEYED

_REF = "#/components/schemas/{model}"
_JSON = "application/json"

_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`, as OpenAI has it."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "`x-api-key: KEY`."},
}


def reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def documented(
    response: type[BaseModel] | Mapping[str, Any],
    description: str,
    *,
    errors: Mapping[str, Any],
    body: type[BaseModel] | None = None,
    examples: Mapping[str, Any] | None = None,
    stream: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the `openapi_extra` of a route.

    `response` is the model of its JSON, or the content by media type. `errors` are its error responses, from
    `ErrorDocs.references`. `body` is the model of the request, with `examples`. `stream` is the content of its streamed
    form by media type, if it has one.
    """
    whole = {_JSON: {"schema": reference(response)}} if isinstance(response, type) else response
    content = {**whole, **(stream or {})}
    operation: dict[str, Any] = {"responses": {"200": {"description": description, "content": content}, **errors}}
    if body is not None:
        accepted = {"schema": reference(body), "examples": dict(examples or {})}
        operation["requestBody"] = {"required": True, "content": {_JSON: accepted}}
    return operation


class DocumentedApp(FastAPI):
    """A FastAPI app whose document holds the models that `documented` refers to. It is built once, at the first request
    for it.

    `responses` and `tags` are those of routes that belong to no dialect. With `keyed`, the document says that the API
    needs a key.
    """

    def __init__(
        self,
        dialects: Dialects,
        *,
        responses: Iterable[type[BaseModel]],
        tags: Iterable[dict[str, Any]],
        keyed: bool,
        **options: Any,
    ) -> None:
        self._dialects = dialects
        docs = [dialect.docs for dialect in dialects.all]
        self._models: list[tuple[type[BaseModel], JsonSchemaMode]] = [
            *((body, "validation") for each in docs for body in each.bodies),
            *((response, "serialization") for each in docs for response in (*each.responses, each.errors.schema)),
            *((response, "serialization") for response in responses),
        ]
        self._keyed = keyed
        self._rendered: bytes | None = None
        named = {tag["name"]: tag for each in docs for tag in each.tags}
        super().__init__(generate_unique_id_function=_operation_id, openapi_tags=[*named.values(), *tags], **options)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = self._joined(super().openapi())
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """FastAPI asks OpenTelemetry for its own instruments here, at every request. Ours listen to the journal."""
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
            return
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        scope["app"] = self
        await self.middleware_stack(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """Without the layers around our own: `Edge` handles every error, and uvicorn those of the layers around it."""
        outermost: Any = self.user_middleware[0].cls
        stack: Any = super().build_middleware_stack()
        while type(stack) is not outermost:
            stack = stack.app
        return cast("ASGIApp", stack)

    def setup(self) -> None:
        """Adds our route for the document first, so it takes precedence: FastAPI's own renders it for each request."""
        assert self.openapi_url is not None
        self.add_route(self.openapi_url, self._send_document, include_in_schema=False)
        super().setup()

    async def _send_document(self, request: Request) -> Response:
        if self._rendered is None:  # off the event loop: it takes a tenth of a second
            self._rendered = await run_in_threadpool(lambda: orjson.dumps(self.openapi()))
        return Response(self._rendered, media_type=_JSON)

    def _joined(self, document: dict[str, Any]) -> dict[str, Any]:
        _, schema = models_json_schema(self._models, ref_template=_REF)
        responses: dict[str, Any] = {}
        for dialect in self._dialects.all:
            responses |= dialect.docs.errors.responses(keyed=self._keyed)
        document["components"] = {"responses": responses}
        for path, methods in document["paths"].items():
            for operation in methods.values():
                self._complete(path, operation)
        if self._keyed:
            document["components"]["securitySchemes"] = _SECURITY_SCHEMES
            document["security"] = [{name: []} for name in _SECURITY_SCHEMES]
        # FastAPI's own schemas are those of its validation errors, which no route of ours returns.
        document["components"]["schemas"] = _reachable(document, schema["$defs"])
        return document

    def _complete(self, path: str, operation: dict[str, Any]) -> None:
        responses = operation["responses"]
        responses.pop("422", None)
        if self._keyed and path == OPEN_PATH:
            operation["security"] = []
        elif self._keyed:
            responses |= self._dialects.of_path(path).docs.errors.references(KEYED)
        operation["responses"] = dict(sorted(responses.items()))


def _reachable(document: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas that the document refers to. Pydantic also lists those of fields whose schema we wrote ourselves."""
    found: set[str] = set()
    new = _names(document)
    while new:
        found |= new
        new = {name for known in new for name in _names(schemas[known])} - found
    return {name: schemas[name] for name in sorted(found)}


def _names(part: object) -> set[str]:
    return set(re.findall(r'"#/components/schemas/(\w+)"', orjson.dumps(part).decode()))


def _operation_id(route: APIRoute) -> str:
    return route.name
