"""What a kind of engine must provide: a scheduler that turns commands into plans, and a backend that runs a plan.

The owner loop, mailbox, links, watchdog and hub know a kind by these protocols alone. `engine/generation/` is one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from millstream.engine.background import BackgroundTask
from millstream.engine.messages import Command, Event, Speculated, Started, Submit
from millstream.model_facts import LoadPhase, ModelFacts

SubmitT = TypeVar("SubmitT", bound=Submit, contravariant=True)
PlanT = TypeVar("PlanT")
PlanInT = TypeVar("PlanInT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)
ResultInT = TypeVar("ResultInT", contravariant=True)
FactsT = TypeVar("FactsT", bound=ModelFacts, covariant=True)


class Progress(Protocol):
    """Called while a model loads, between two pieces of work. It raises if the load is to be given up."""

    def __call__(self, share: float, phase: LoadPhase = "reading weights") -> None:
        """`share` of the phase is done, from 0 to 1."""
        ...


def ignore_progress(share: float, phase: LoadPhase = "reading weights") -> None:
    """For callers that do not show progress."""


class Backend(Protocol[SubmitT, PlanInT, ResultT, FactsT]):
    """Runs plans on a model. Every method is called on the owner thread, and on no other."""

    def load(self, report: Progress = ignore_progress) -> FactsT:
        """Owner only. Load the model here, evaluate all of it, and report progress meanwhile. What `report` raises
        ends the load."""
        ...

    def background_task(self, request: SubmitT | None) -> BackgroundTask | None:
        """Owner only. Work that another thread must complete before this request may run, if any. It must hold and
        touch nothing of MLX. For None: work worth doing while the model loads."""
        ...

    def memory_bytes(self) -> int:
        """Owner only. The memory that its arrays take now."""
        ...

    def step(self, plan: PlanInT) -> ResultT:
        """Owner only. Run one plan. If it raises, the owner calls `reset` before the next step."""
        ...

    def reset(self) -> None:
        """Owner only. Drop every request and keep the model."""
        ...

    def close(self) -> None:
        """Owner only. Free the model, its caches and the stream. Nothing is called after it."""
        ...


class Scheduler(Protocol[SubmitT, PlanT, ResultInT]):
    """Decides what the next step runs and turns its result into events. Pure: no thread, clock or MLX.

    Every accepted request ends in exactly one `Finished` or `Failed`.
    """

    @property
    def commands(self) -> tuple[type[Command], ...]:
        """What only this kind of engine understands: its requests, for `submit`, and commands, for `handle`. The owner
        refuses all others."""
        ...

    @property
    def idle(self) -> bool:
        """True if there is nothing to plan: the owner may sleep until mail comes."""
        ...

    def submit(self, submit: SubmitT, *, held: bool = False) -> None:
        """Accept a request. With `held`, it stays outside the queue until `release` or `refuse`."""
        ...

    def release(self, request_id: int) -> None:
        """The background task of a held request is done. Ignores requests that have ended."""
        ...

    def refuse(self, request_id: int, message: str, *, refused: bool = False) -> Iterable[Event]:
        """The background task of a held request failed. `refused`: because of the client's input."""
        ...

    def cancel(self, request_id: int) -> Iterable[Event]:
        """End a request now. Ignores unknown ids."""
        ...

    def handle(self, command: Command) -> Iterable[Event]:
        """Handle a command that only this kind of engine has."""
        ...

    def wake_by(self, wake: Callable[[], None]) -> None:
        """`wake` may be called on any thread when there is something to `collect`."""
        ...

    def collect(self) -> None:
        """Take in what other threads have completed."""
        ...

    def plan(self) -> PlanT:
        """The next step."""
        ...

    def started(self) -> Iterable[Started]:
        """The requests that the last plan took from the queue for the first time. Asked once after each plan."""
        ...

    def advance(self, plan: PlanT, result: ResultInT, seconds: float = 0.0) -> Iterable[Event]:
        """Book a step that succeeded. `seconds`: its duration, if known."""
        ...

    def fail(self, message: str) -> Iterable[Event]:
        """Book a step that raised: every request that the backend holds fails."""
        ...

    def fail_all(self, message: str) -> Iterable[Event]:
        """The engine is going: fail every request."""
        ...

    def cache_bytes(self) -> tuple[int, int]:
        """The bytes of caches that outlive requests, in memory and on disk."""
        ...

    def kv_tokens(self) -> int | None:
        """Tokens that the running requests hold in KV caches; None for kinds without such caches."""
        ...

    def speculated(self) -> Speculated | None:
        """What speculative decoding has done; None for kinds and models without it."""
        ...

    def close(self) -> None:
        """The engine is going: complete writes to disk."""
        ...


BackendFactory = Callable[[], Backend[Any, Any, Any, Any]]
"""Called on the owner thread, so that MLX is imported and its stream made there."""

SchedulerFactory = Callable[[Any], Scheduler[Any, Any, Any]]
"""Called on the owner thread with the facts of the loaded model."""
