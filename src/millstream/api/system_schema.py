"""Response models of the routes about the server itself, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from millstream.api.response_schema import ResponseSchema

State = Literal["unloaded", "loading", "ready", "unloading", "failed", "stopped"]


class About(ResponseSchema):
    """The server's name and version."""

    name: Literal["Millstream"]
    version: str
    docs: str
    """The path of the page that documents the API."""


class Health(ResponseSchema):
    """The server's own view. It asks no engine, so it responds while every engine is busy."""

    status: Literal["ok", "degraded", "failed"]
    """ok: every model is ready or will be when it is used. degraded: some models have failed. failed: all have."""
    models: dict[str, State]
    """The state of each model."""
