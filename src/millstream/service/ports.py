"""The service as dialects see it, as protocols. `api` depends on these and on nothing else of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from millstream.model_facts import ModelCard
from millstream.realtime_types import ClientSecret, Item, ResponseOptions, ServerEvent, SessionConfig
from millstream.speech_types import Segment, SpeechRequest, TranscriptionRequest, Voice
from millstream.types import (
    Delta,
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    RerankRequest,
    Sampling,
    Scores,
    Usage,
)


class DeltaSink(Protocol):
    """Takes deltas on the event loop, in the middle of whatever brought them: it must not wait."""

    def ready(self) -> bool:
        """Whether deltas may be delivered now. If not, the iteration yields them, and may wait."""
        ...

    def deliver(self, deltas: Sequence[Delta]) -> None: ...


class Generation(Protocol):
    """One accepted request. The caller must iterate it to its end or `cancel` it."""

    @property
    def model(self) -> str:
        """The name of the model that answers."""
        ...

    @property
    def sampling(self) -> Sampling:
        """What is in force: as the client asked, else the model's defaults."""
        ...

    @property
    def usage(self) -> Usage:
        """Tokens so far, over all prompts and choices; final once the iteration has ended."""
        ...

    def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        """Batches of deltas as they arrive. Each choice ends in one delta with a `finish_reason`.

        Raises `StepFailed` or `EngineGone` if the engine fails the request, and `OutputUnread` if too much is unread.
        """
        ...

    def deliver_to(self, sink: DeltaSink) -> None:
        """Give the sink what the iteration waits for, as far as it can: per token this costs much less than to resume
        the task that iterates. The iteration still yields the rest, in order, and ends as it would."""
        ...

    def cancel(self, outcome: str = "cancelled") -> None:
        """Stop the request. Safe at any time and more than once; does not wait. `outcome`: its label in metrics."""
        ...


class GenerationService(Protocol):
    async def start(self, request: GenerationRequest) -> Generation:
        """Find the engine, prepare the prompts, be admitted. Raises a `MillstreamError` if any of it fails.

        If it is cancelled meanwhile, nothing stays admitted.
        """
        ...

    async def count_tokens(self, request: GenerationRequest) -> int:
        """The number of tokens of the prompts, as `start` would count them. Loads the model if need be. No engine is
        asked. Raises the same errors as `start`, but counts prompts that are too long for the model as well."""
        ...


class EncodingService(Protocol):
    """Embedding models and rerankers. If a call is cancelled, so is its work."""

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Raises a `MillstreamError` if an input cannot be embedded: then none is."""
        ...

    async def score(self, request: RerankRequest) -> Scores: ...


class Transcription(Protocol):
    """One accepted request. The caller must iterate it to its end or `cancel` it."""

    @property
    def model(self) -> str:
        """The name of the model that answers."""
        ...

    @property
    def duration(self) -> float:
        """Seconds of audio."""
        ...

    @property
    def language(self) -> str | None:
        """The code of the language that is spoken. Known once the first segment was given, and at the end."""
        ...

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and of the transcript; final once the iteration has ended."""
        ...

    def __aiter__(self) -> AsyncIterator[Segment]:
        """The segments in their order, each as soon as all before it are known. Raises like `Generation`."""
        ...

    def cancel(self) -> None:
        """Stop the request. Safe at any time and more than once; does not wait."""
        ...


class TranscriptionService(Protocol):
    async def start(self, request: TranscriptionRequest) -> Transcription:
        """Find the engine, fetch and decode the audio, be admitted. Raises a `MillstreamError` if any of it fails."""
        ...


class Speech(Protocol):
    """One accepted request. The caller must iterate it to its end or `cancel` it."""

    @property
    def model(self) -> str: ...

    @property
    def sample_rate(self) -> int: ...

    @property
    def usage(self) -> Usage:
        """Tokens (phonemes, for models that read those) of the text; final once the iteration has ended."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Mono samples as 32-bit floats of this machine, from -1 to 1, in pieces as sentences are ready."""
        ...

    def cancel(self) -> None:
        """Stop the request. Safe at any time and more than once; does not wait."""
        ...


class SpeechService(Protocol):
    async def start(self, request: SpeechRequest) -> Speech:
        """Find the engine, check text and voice, be admitted. Raises a `MillstreamError` if any of it fails."""
        ...

    async def voices(self, model: str) -> Sequence[Voice]:
        """The voices of a speech model, the default first. "" for the first model that speaks."""
        ...


class Outbox(Protocol):
    """Where a realtime session puts its events. They are sent in order."""

    def put(self, event: ServerEvent) -> None: ...

    async def room(self) -> None:
        """Returns once the client has read most of what was put."""
        ...


class RealtimeSession(Protocol):
    """A conversation by voice, or a transcript as it is spoken. Use it on one event loop, and `close` it.

    What a client asks for wrongly raises a `MillstreamError`, and the session goes on.
    """

    @property
    def id(self) -> str: ...

    @property
    def config(self) -> SessionConfig: ...

    def update(self, config: SessionConfig) -> None:
        """Later audio and responses follow these settings."""
        ...

    async def append(self, audio: bytes) -> None:
        """Take more audio. Waits while too much of it is not transcribed yet."""
        ...

    def commit(self) -> None:
        """Make an item of the audio so far."""
        ...

    def clear(self) -> None:
        """Forget the audio that is not committed."""
        ...

    async def create_item(self, item: Item, previous_item_id: str | None) -> None:
        """`previous_item_id`: None for the end, "root" for the begin. An item without an id gets one."""
        ...

    def delete_item(self, item_id: str) -> None: ...

    def truncate_item(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """The client played no more than this of an answer: the conversation forgets the rest."""
        ...

    def retrieve_item(self, item_id: str) -> None:
        """Send it as an event."""
        ...

    def item(self, item_id: str) -> Item:
        """Raises `ItemNotFound`."""
        ...

    def create_response(self, options: ResponseOptions) -> None: ...

    def cancel_response(self, response_id: str | None) -> None:
        """None: the one that runs."""
        ...

    async def close(self) -> None:
        """Cancel all work. Returns once it has ended."""
        ...


class RealtimeService(Protocol):
    def resolve(self, config: SessionConfig) -> SessionConfig:
        """The settings with the names of the models that they mean. Raises if one is not served."""
        ...

    def issue_secret(self, config: SessionConfig, seconds: int) -> ClientSecret:
        """A key for a browser. `config` is resolved."""
        ...

    def redeem_secret(self, value: str) -> SessionConfig | None:
        """What such a key was issued for. None if it is none, or has expired."""
        ...

    def open(self, config: SessionConfig, outbox: Outbox) -> RealtimeSession:
        """Raises a `MillstreamError` if a model is not served, or if too many sessions are open."""
        ...


class ModelService(Protocol):
    """Models of every kind."""

    def models(self) -> Sequence[ModelCard]: ...

    def model(self, name: str) -> ModelCard:
        """The card of a model, by its name or an alias; "" for the default model. Raises `NotFound`."""
        ...

    async def load(self, name: str) -> ModelCard:
        """Load a model now. Returns once it is loaded."""
        ...

    async def unload(self, name: str) -> ModelCard:
        """Free a model, after its running requests have had a moment to finish."""
        ...

    def keep_loaded(self, name: str, seconds: float | None) -> ModelCard:
        """Unload the model after so many idle seconds, instead of what the settings say. None: as the settings say.
        Infinity: never. 0: as soon as it is idle. Holds until the model is unloaded; a pinned model never is."""
        ...

    def clear_cache(self, name: str) -> ModelCard:
        """Drop what a model caches between requests, such as prefixes."""
        ...

    def healthy(self) -> dict[str, str]:
        """The state of each model by name, from the service's own memory: no engine is asked."""
        ...

    def render_metrics(self) -> tuple[bytes, str]:
        """The Prometheus page and its content type."""
        ...


class Seal(Protocol):
    """Text that clients hold for the server, such as reasoning: only this server can read or make it, and only for the
    owner for whom it was made."""

    def of(self, owner: str) -> Seal:
        """The seal of this owner; "" is for all whom the server does not tell apart."""
        ...

    def seal(self, text: str) -> str:
        """The text, encrypted and signed, as URL-safe base64."""
        ...

    def open(self, sealed: str) -> str | None:
        """What was sealed. None if it was changed, or was sealed by another server."""
        ...


class RecordStore(Protocol):
    """Bounded, expiring storage of what clients may ask for again, such as stored responses."""

    def of(self, owner: str) -> RecordStore:
        """The records of this owner; "" is for all whom the server does not tell apart. Those of others do not exist
        there."""
        ...

    async def put(self, key: str, record: bytes) -> None:
        """Stores or replaces a record. The least recently used ones give way."""
        ...

    async def get(self, key: str) -> bytes | None: ...

    async def delete(self, key: str) -> bool:
        """True if there was such a record."""
        ...


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a tool server."""

    name: str
    description: str
    parameters: dict[str, Any]
    """The JSON schema of its arguments, an object."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a call returned. If `is_error`, the text says what went wrong, in words for the model."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class ToolServerCard:
    """A tool server as its owner last saw it."""

    label: str
    state: Literal["starting", "ready", "failed"]
    """A server that failed is started again after a pause."""
    error: str | None = None
    """Why it failed, or why it is started again."""
    tools: tuple[ServerTool, ...] = ()


class ToolServers(Protocol):
    """The MCP servers of the configuration file. A failing one costs its own calls only."""

    @property
    def labels(self) -> Sequence[str]:
        """The names of all servers."""
        ...

    def cards(self) -> Sequence[ToolServerCard]:
        """The state of each server, from the service's own memory: no server is asked."""
        ...

    async def tools(self, label: str) -> Sequence[ServerTool]:
        """The tools of a server. Raises `BadRequest` if there is no such server, and `ToolServerFailed` if it cannot
        be reached."""
        ...

    async def call(self, label: str, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Calls a tool, within the server's time limit. A failure is an output with `is_error`."""
        ...


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The server as a whole. None where it is not known."""

    uptime: float
    memory_budget: int | None
    """Bytes for all models together, if there is a budget."""
    memory_used: int
    """Bytes that the loaded models take now."""
    pid: int
    rss_bytes: int | None
    """Resident memory of the server's own process; engines in processes of their own are not in it."""


@dataclass(frozen=True, slots=True)
class HistoryView:
    """A part of the history, as columns."""

    interval: float
    now: float
    times: Sequence[float]
    """When each interval ended, in seconds since 1970."""
    models: dict[str, dict[str, list[float | None]]]
    """By model and name of the series: one value for each of `times`."""


@dataclass(frozen=True, slots=True)
class PhaseView:
    """A phase of a request, in seconds since 1970. `end` is None while it lasts."""

    name: str
    start: float
    end: float | None


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request, running or ended. It never holds what was said."""

    id: str
    model: str
    dialect: str
    endpoint: str
    state: str
    """`preparing`, `queued`, `prefill`, `decode`, `done`, `cancelled` or `failed`."""
    started: float
    phases: Sequence[PhaseView]
    first_token: float | None
    """Seconds from the start to the first output."""
    total: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int
    drafted_tokens: int
    """Tokens of drafts that were verified."""
    accepted_tokens: int
    """Of these, those that are in the answer."""
    finish_reason: str | None
    error: str | None


class ServerState(Protocol):
    """What the server does now and did in the last hour, from its own memory: no engine is asked."""

    def status(self) -> ServerStatus: ...

    def history(self, since: float) -> HistoryView:
        """The samples after `since`, in seconds since 1970."""
        ...

    def requests(self, limit: int) -> tuple[Sequence[RequestView], Sequence[RequestView]]:
        """The running requests, and at most `limit` of those that ended last; newest first."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """All use cases, one for each kind of model, the operations on models, and what dialects need besides."""

    models: ModelService
    generation: GenerationService
    encoding: EncodingService
    transcription: TranscriptionService
    speech: SpeechService
    realtime: RealtimeService
    seal: Seal
    records: RecordStore
    tool_servers: ToolServers
    state: ServerState
    problems: Callable[[], Sequence[str]] = tuple
    """What does not work now though every model may, such as writing to a full disk. Asks no disk."""

    def of(self, owner: str) -> Services:
        """The same services, for what this owner alone may read or find again."""
        return replace(self, seal=self.seal.of(owner), records=self.records.of(owner))
