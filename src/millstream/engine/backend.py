"""What the owner loop asks of a backend. Every method is called on the owner thread, and on no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from millstream.engine.messages import Submit
from millstream.types import ModelFacts, TokenLogprob


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run `request.prompt[start:end]` into the request's own cache. The last prompt token is never prefilled:
    it is the first input of the decode step that the row joins once `end == len(prompt) - 1`."""

    request: Submit
    start: int
    end: int
    reuse: tuple[int, ...] = ()
    """In the first chunk only: the kept blocks that hold `request.prompt[:start]`."""

    @property
    def joins(self) -> bool:
        return self.end == len(self.request.prompt) - 1


@dataclass(frozen=True, slots=True)
class Look:
    """Encode a request's media from number `first` on, for about as long as reading `tokens` of a prompt takes. What a
    step leaves undone, the next one goes on with."""

    request: Submit
    first: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep blocks of a row's tokens for later requests: number `first` under the first handle, and so on."""

    request_id: int
    first: int
    block: int
    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, as data: keep and drop rows first, then decode every row in the batch, and prefill these chunks.

    A row whose prefill is complete joins the batch at the next step. What is kept is taken from rows in the batch, also
    from those that join or are dropped in this step; what is forgotten is forgotten after that.
    """

    keep: tuple[Keep, ...] = ()
    forget: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[int, ...] = ()
    look: tuple[Look, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.drop or self.prefill or self.decode or self.look)


@dataclass(frozen=True, slots=True)
class RowOutput:
    """Tokens that a row produced since the last step that reported it. A backend may run a step behind."""

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    rows: tuple[RowOutput, ...] = field(default=())
    seen: tuple[tuple[int, int], ...] = ()
    """Requests that were looked at, and how many of their media may be read now, counted from the first."""
    failed: tuple[tuple[int, str], ...] = ()
    """Requests that cannot go on, and why. Nobody else is touched."""


Progress = Callable[[float], None]
"""Told how much is done, from 0 to 1."""


def ignore_progress(done: float) -> None:
    """For those who do not ask how far a load is."""


class BatchBackend(Protocol):
    """A model that decodes many rows in one step. All methods are for the owner alone."""

    def load(self, report: Progress = ignore_progress) -> ModelFacts:
        """Owner only. Load the model here and evaluate all of it; tell `report` how far that is."""
        ...

    def memory_bytes(self) -> int:
        """Owner only. What its arrays take now: weights, keys and values."""
        ...

    def step(self, plan: Plan) -> StepResult:
        """Owner only. Run one plan. If it raises, the owner calls `reset` before the next step."""
        ...

    def reset(self) -> None:
        """Owner only. Forget every row, keep the model."""
        ...

    def close(self) -> None:
        """Owner only. Free the model, its caches and the stream. Nothing is called after it."""
        ...


BackendFactory = Callable[[], BatchBackend]
"""Called on the owner thread, so that importing MLX and making its stream happen there too."""
