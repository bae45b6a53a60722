"""Request bodies in /docs. The routes read their bodies themselves, so FastAPI has to be told what they take."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is this model."""
    reference = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


class DocumentedApp(FastAPI):
    """A FastAPI app whose OpenAPI page also holds the models that `documented` refers to."""

    def __init__(self, *, bodies: tuple[type[BaseModel], ...], **options: Any) -> None:
        super().__init__(**options)
        self._bodies = bodies

    def openapi(self) -> dict[str, Any]:
        page = super().openapi()
        _, schema = models_json_schema([(body, "validation") for body in self._bodies], ref_template=_REF)
        schemas = page.setdefault("components", {}).setdefault("schemas", {})
        for body in self._bodies:
            schemas[body.__name__] = schema["$defs"][body.__name__]
        return page
