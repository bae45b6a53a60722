"""The base of models that describe an answer in /openapi.json. They are documentation: no answer is validated against
them while the server runs, and the tests hold real answers against them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

ABSENT: Any = None
"""The default of a field that an answer may leave out."""


def _without_defaults(schema: dict[str, Any]) -> None:
    """An answer has no defaults: a field is there or it is not."""
    for field in schema.get("properties", {}).values():
        field.pop("default", None)


class AnswerSchema(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, json_schema_extra=_without_defaults)
