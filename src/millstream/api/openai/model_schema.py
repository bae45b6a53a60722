"""What the routes about models answer, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from millstream.api.response_schema import ResponseSchema
from millstream.api.system_schema import State


class Model(ResponseSchema):
    """A model of this server: OpenAI's four fields, and what an operator wants to know."""

    id: str
    """The name that requests use."""
    object: Literal["model"]
    created: int
    """When the server began to serve it, in seconds since 1970."""
    owned_by: Literal["millstream"]
    state: State
    progress: float | None
    """How much of it is loaded, from 0 to 1, while it loads."""
    error: str | None
    """Why it failed."""
    aliases: list[str]
    """Other names that requests may use."""
    isolation: Literal["thread", "process"]
    """Where its engine runs: on a thread of the server, or in a process of its own."""
    pid: int | None
    """The process of its engine."""
    thread: int | None
    """The thread of its engine."""
    pinned: bool
    """It is never unloaded to make room, nor when it is idle."""
    memory_bytes: int
    """Memory that it takes."""
    prefix_cache_bytes: int
    """What of that is its prefix cache."""
    prefix_cache_disk_bytes: int
    """The prefix cache on disk."""
    reserved_bytes: int | None
    """What it holds of the server's memory budget, if there is one."""
    kv_bytes_per_token: int | None
    """Keys and values of one token."""
    active: int
    """Requests that it is answering."""
    waiting: int
    """Requests in its queue."""
    max_batch: int | None
    """The most requests that it answers at once."""
    context_length: int | None
    """Tokens of a prompt and its answer together."""
    restarts: int
    """How often its engine ended unasked and was started again."""


class ModelList(ResponseSchema):
    """All models of this server, loaded or not."""

    object: Literal["list"]
    data: list[Model]
