"""Holds real answers against the schemas of /openapi.json."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"


class Document:
    """An OpenAPI document. Its objects are closed here: an answer has the fields that are documented and no others."""

    def __init__(self, page: dict[str, Any]) -> None:
        self.page = page
        self._components = copy.deepcopy(page["components"])
        for schema in self._components["schemas"].values():
            if "properties" in schema:
                schema.setdefault("additionalProperties", False)

    def operations(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for path, methods in self.page["paths"].items():
            for method, operation in methods.items():
                yield method.upper(), path, operation

    def response(self, method: str, path: str, status: int) -> dict[str, Any]:
        """What is documented for this status of a route."""
        found = self.page["paths"][path][method.lower()]["responses"].get(str(status))
        assert found is not None, f"{method} {path} does not document the status {status}"
        reference = found.get("$ref")
        return found if reference is None else self.page["components"]["responses"][reference.rsplit("/", 1)[1]]

    def check(self, path: str, answer: httpx.Response) -> None:
        """Fails unless this answer of the route at `path` is one that is documented."""
        documented = self.response(answer.request.method, path, answer.status_code)
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in documented["content"], f"{kind} is not among {list(documented['content'])}"
        schema = documented["content"][kind]["schema"]
        if kind == EVENTS:
            self._check_events(schema, answer.text)
        elif kind == LINES:
            assert answer.text.endswith("\n")
            for line in answer.text.splitlines():
                self.validate(schema, json.loads(line))
        else:
            self.validate(schema, answer.json() if kind == "application/json" else answer.text)

    def validate(self, schema: dict[str, Any], value: object) -> None:
        jsonschema.Draft202012Validator({"components": self._components, **schema}).validate(value)

    def _check_events(self, schema: dict[str, Any], text: str) -> None:
        *events, rest = text.split("\n\n")
        assert events and rest == "", "a stream ends with an empty line"
        payload, done = schema["properties"]["data"]["anyOf"]
        datas = [event.removeprefix("data: ") for event in events if not event.startswith(":")]
        for data in datas:
            self.validate(schema, {"data": data})
        for data in datas[:-1]:
            self.validate(payload["contentSchema"], json.loads(data))
        if datas[-1] != done["const"]:
            assert "error" in json.loads(datas[-1]), "a stream ends with [DONE] or with an error"


def references(part: object) -> Iterator[str]:
    """Every `$ref` in a part of a document."""
    if isinstance(part, dict):
        yield from (value for key, value in part.items() if key == "$ref")
        part = list(part.values())
    if isinstance(part, list):
        for child in part:
            yield from references(child)
