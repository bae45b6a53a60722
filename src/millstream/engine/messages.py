"""Messages between an engine and its server: frozen, plain data. Commands go in, events come out.

This module holds what every kind of engine understands. A kind adds its own: a subclass of `Submit` with the work that
it does, subclasses of `Output` for partial results, and a subclass of `Finished` for the end of a request.

No array is ever in a message, so the same messages cross a thread or a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from millstream.model_facts import LoadPhase, ModelFacts
from millstream.types import pickled_by_value, quickly_made


@quickly_made
@dataclass(frozen=True, slots=True)
class Command:
    """What an engine is asked to do. A kind's own commands reach its scheduler (`Scheduler.handle`)."""


@quickly_made
@dataclass(frozen=True, slots=True)
class Submit(Command):
    """Start a request. If the mailbox accepts it, exactly one `Finished` or `Failed` follows."""

    request_id: int


@quickly_made
@dataclass(frozen=True, slots=True)
class Cancel(Command):
    """Drop a request before the next step. Unknown or ended ids are ignored: the race is normal."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Shutdown(Command):
    """Fail what is left, free the model on the owner, then stop."""

    reason: str = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class Wake(Command):
    """Sent by the engine's own threads: a background task or a disk read has completed."""


@quickly_made
@dataclass(frozen=True, slots=True)
class Event:
    """What an engine reports."""


@quickly_made
@dataclass(frozen=True, slots=True)
class RequestEvent(Event):
    """News of one request."""

    may_be_large: ClassVar[bool] = False
    """True if one such event may take much memory by itself."""

    request_id: int

    @property
    def nbytes(self) -> int:
        """Roughly the memory that it takes while it waits for a reader."""
        return EVENT_BYTES


@pickled_by_value
@quickly_made
@dataclass(frozen=True, slots=True)
class Started(RequestEvent):
    """The request has left the queue: the step that now begins is the first that works on it."""

    cached_tokens: int = 0
    """Tokens of its prompt that are not computed, because a cache has them. For kinds that have prompts."""


@quickly_made
@dataclass(frozen=True, slots=True)
class Output(RequestEvent):
    """A partial result of a request that goes on."""


@quickly_made
@dataclass(frozen=True, slots=True)
class Outputs(Event):
    """One small result for each of many requests, in columns: an object for each costs more than the result. A kind
    derives its own."""

    request_ids: tuple[int, ...]
    values: tuple[Any, ...]

    def output(self, request_id: int, values: Sequence[Any]) -> Output:
        """Results of one request, in order, as an event of its own."""
        raise NotImplementedError


def expanded(events: Iterable[Event]) -> Iterator[Event]:
    """The events with those in columns as one for each request: for those who need not be quick."""
    for event in events:
        if isinstance(event, Outputs):
            for request_id, value in zip(event.request_ids, event.values, strict=True):
                yield event.output(request_id, (value,))
        else:
            yield event


@quickly_made
@dataclass(frozen=True, slots=True)
class Finished(RequestEvent):
    """The request is complete."""


@dataclass(frozen=True, slots=True)
class Failed(RequestEvent):
    """The request has failed."""

    message: str
    gone: bool = False
    """True if the engine itself is going, false if only this step failed."""
    refused: bool = False
    """True if the client's input is at fault, such as a grammar that no output can follow."""


@dataclass(frozen=True, slots=True)
class Loading(Event):
    """How far the load is: this share of its phase is done, from 0 to 1."""

    share: float
    phase: LoadPhase = "reading weights"


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """The model is ready."""

    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class LoadFailed(Event):
    """The model cannot be loaded."""

    message: str
    device_lost: bool = False
    """The device, or the process, failed: another process may load the model without some fast path."""
    died: bool = False
    """The engine's process ended without a word: the model may be fine."""


@dataclass(frozen=True, slots=True)
class Speculated:
    """What speculative decoding has done since the model was loaded."""

    passes: int = 0
    """Forward passes that verified drafts."""
    drafters: tuple[tuple[str, int, int], ...] = ()
    """(drafter, its tokens that were verified, how many of them were right)."""
    gain: float = 1.0
    """Of the latest such passes: tokens per second over those of plain steps; 1: there was none, or it is not known."""


@dataclass(frozen=True, slots=True)
class Measured(Event):
    """The memory of the engine's arrays now."""

    memory_bytes: int
    cache_bytes: int = 0
    """Of these, the bytes of caches that outlive requests."""
    disk_bytes: int = 0
    """The bytes of such caches on disk."""
    kv_tokens: int | None = None
    """Tokens that the running requests hold in KV caches; None for kinds without such caches."""
    speculated: Speculated | None = None
    """None for kinds and models without speculative decoding."""


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """The last event: the model, its caches and its stream are gone."""

    cause: str | None = None
    """The reason if the engine stopped by itself, else None."""


EVENT_BYTES = 160
"""The memory of a small event in Python."""
