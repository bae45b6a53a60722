"""Response models of the routes about models, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from millstream.api.response_schema import ResponseSchema
from millstream.api.system_schema import State
from millstream.model_facts import LoadPhase


class ChunkCost(ResponseSchema):
    tokens: int
    seconds: float


class StepCost(ResponseSchema):
    rows: int
    seconds: float


class Measured(ResponseSchema):
    """What a short run measured when the model was loaded."""

    chunks: list[ChunkCost]
    """Prefill chunks, while nothing else runs."""
    steps: list[StepCost]
    """Decode steps."""
    workspace_bytes: int
    """Memory beside weights and KV cache at the peak of the longest chunk."""


class Drafts(ResponseSchema):
    drafter: str
    proposed: int
    """Tokens that were verified."""
    accepted: int
    """Of these, those that the model chose, too."""


class Speculation(ResponseSchema):
    """Speculative decoding since the model was loaded."""

    drafters: list[str]
    """All that it has, in order of preference: `grammar`, `prediction`, `mtp`, `draft-model`, `prompt-lookup`."""
    passes: int
    """Forward passes that verified drafts."""
    gain: float
    """Of the latest such passes: tokens per second over those without drafts."""
    drafts: list[Drafts]


class Model(ResponseSchema):
    """A model of this server: OpenAI's four fields, and more for operators."""

    id: str
    """The name that requests use."""
    object: Literal["model"]
    created: int
    """When the server began to serve it, in seconds since 1970."""
    owned_by: Literal["millstream"]
    state: State
    progress: float | None
    """While the model loads: the fraction of `phase` that is done, from 0 to 1."""
    phase: LoadPhase | None
    """While the model loads: what the load does. Each phase has a `progress` of its own."""
    error: str | None
    """Why it failed."""
    aliases: list[str]
    """Other names that requests may use."""
    isolation: Literal["thread", "process"]
    """Where its engine runs: on a thread of the server, or in its own process."""
    pid: int | None
    """The process id of its engine."""
    thread: int | None
    """The thread id of its engine."""
    pinned: bool
    """If true, it is never unloaded to free memory or because it is idle."""
    memory_bytes: int
    """Memory in use."""
    prefix_cache_bytes: int
    """The part of `memory_bytes` that is its prefix cache."""
    prefix_cache_disk_bytes: int
    """Size of the prefix cache's disk tier."""
    reserved_bytes: int | None
    """Its reservation in the server's memory budget, if there is one."""
    kv_bytes_per_token: int | None
    """KV cache size per token."""
    active: int
    """Running requests."""
    waiting: int
    """Queued requests."""
    max_batch: int | None
    """Maximum number of requests that run at once."""
    context_length: int | None
    """Maximum number of tokens of a prompt and its completion together."""
    restarts: int
    """How often its engine ended unexpectedly and was restarted."""
    capabilities: list[str]
    """What it can do: `completion`, `tools`, `thinking`, `vision`, `audio`, `insert`. Empty while that is not known."""
    family: str | None
    """The architecture, such as `qwen3`."""
    quantization: str | None
    """Of its files."""
    device: str | None
    """Where it runs, once it is loaded."""
    weight_bytes: int | None
    """The memory of its weights, once it is loaded."""
    notes: list[str]
    """How it runs, once it is loaded: which fast paths it got, and why not others."""
    speculation: Speculation | None
    """null if it is not loaded, or does not speculate: then `notes` say why."""
    calibration: Measured | None
    """What was measured when it was loaded; null for small models, and with `--disable calibration`."""


class ModelList(ResponseSchema):
    """All models of this server, loaded or not."""

    object: Literal["list"]
    data: list[Model]
