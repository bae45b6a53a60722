"""What the routes about the server itself answer, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from millstream.api.answer_schema import AnswerSchema

State = Literal["unloaded", "loading", "ready", "unloading", "failed", "stopped"]


class About(AnswerSchema):
    """The server's name and version."""

    name: Literal["Millstream"]
    version: str
    docs: str
    """The path of the page that describes the API."""


class Health(AnswerSchema):
    """The server's own view: no engine is asked, so it answers while every engine is busy."""

    status: Literal["ok", "degraded", "failed"]
    """ok: every model answers or will when it is used. degraded: some models have failed. failed: all have."""
    models: dict[str, State]
    """The state of each model."""
