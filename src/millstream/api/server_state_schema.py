"""Response models of /server/..., for /openapi.json."""

from __future__ import annotations

from typing import Literal

from millstream.api.response_schema import ResponseSchema

MAX_REQUESTS = 500


class MemoryStatus(ResponseSchema):
    """The memory of all models together."""

    budget_bytes: int | None
    """The budget of `--memory`, if there is one."""
    used_bytes: int | None
    """What the loaded models take now: weights and caches."""


class ProcessStatus(ResponseSchema):
    """The server's own process."""

    pid: int
    rss_bytes: int | None
    """Its resident memory, where the system tells it. Engines in processes of their own are not in it."""


class Status(ResponseSchema):
    """The server as a whole."""

    version: str
    uptime: float
    """Seconds since the start."""
    memory: MemoryStatus
    process: ProcessStatus


class ModelHistory(ResponseSchema):
    """The samples of one model: lists as long as `times`. A value is null where nothing was measured."""

    generated_tokens_per_second: list[float | None]
    prompt_tokens_per_second: list[float | None]
    """Tokens of prompts that were completed in the interval, cached ones included."""
    active: list[int | None]
    """Requests that run at the end of the interval."""
    waiting: list[int | None]
    """Requests in the queue at the end of the interval."""
    first_token_p50: list[float | None]
    """Seconds from a request to its first output: median. Quantiles are exact to about 5 %."""
    first_token_p99: list[float | None]
    gap_p50: list[float | None]
    """Seconds between two deltas of a request: median."""
    gap_p99: list[float | None]
    memory_bytes: list[int | None]
    kv_tokens: list[int | None]
    """Tokens that the running requests hold in the KV cache."""
    prefix_cache_bytes: list[int | None]
    cached_share: list[float | None]
    """Of the prompt tokens, the share that came from the prefix cache: from 0 to 1."""
    requests: list[int | None]
    """Requests that ended in the interval."""
    failures: list[int | None]
    """Of these, those that the server or the model failed."""


class ServerHistory(ResponseSchema):
    """The last hour, or what is asked for of it."""

    interval: float
    """Seconds between two samples."""
    now: float
    """The server's clock. All times are seconds since 1970."""
    times: list[float]
    """When each interval ended."""
    models: dict[str, ModelHistory]


class RequestPhase(ResponseSchema):
    """A phase of a request."""

    name: Literal["prepare", "queue", "prefill", "decode"]
    """prepare: load the model if need be, fetch media, render and tokenise the prompt. queue: wait for a row. prefill:
    until the first token. decode: until the end."""
    start: float
    """In seconds since 1970."""
    end: float | None
    """null while it lasts."""


class RequestEntry(ResponseSchema):
    """A request to a model. What was said is never kept."""

    id: str
    """As in the header `x-request-id`. One HTTP request may ask a model several times, for example around tools."""
    model: str
    dialect: str
    """The API that the client speaks, for example `openai`."""
    endpoint: str
    """The path of the URL."""
    state: Literal["preparing", "queued", "prefill", "decode", "done", "cancelled", "failed"]
    started: float
    """In seconds since 1970."""
    phases: list[RequestPhase]
    first_token: float | None
    """Seconds from the start to the first output."""
    total: float | None
    """Seconds from the start to the end."""
    prompt_tokens: int | None
    cached_tokens: int | None
    """Of these, those from the prefix cache."""
    completion_tokens: int | None
    drafted_tokens: int
    """Tokens of drafts that were verified, known when the request has ended."""
    accepted_tokens: int
    """Of these, those that are in the answer."""
    finish_reason: str | None
    """As the model ended (`stop`, `length`, `tool_calls`), or how it was cancelled (`cancelled`; `stalled` or `unread`
    if the client did not read)."""
    error: str | None
    """Why it failed. Errors that may quote the client are told by their code."""


class ServerRequests(ResponseSchema):
    """Requests to models, newest first."""

    running: list[RequestEntry]
    recent: list[RequestEntry]
    """Requests that have ended."""


MODELS = (Status, ServerHistory, ServerRequests)
