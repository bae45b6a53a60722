"""What the owner loop asks of a backend. Every method is called on the owner thread, and on no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from millstream.engine.background import BackgroundTask
from millstream.engine.messages import Submit
from millstream.types import ModelFacts, Tensor, TokenLogprob


@dataclass(frozen=True, slots=True)
class SavePrefix:
    """Keep a row's first `tokens` for later requests: block number `first` under the first handle, and so on; and,
    where prompts go on from states, the state that it has after them. The blocks before `first` are kept already."""

    request_id: int
    first: int
    block: int
    handles: tuple[int, ...]
    state: int | None = None
    tokens: int = 0
    ticket: int | None = None
    """Under which number the blocks are to be handed out as plain data, for the disk."""
    checkpoint_ticket: int | None = None

    @property
    def all_handles(self) -> tuple[int, ...]:
        return self.handles if self.state is None else (*self.handles, self.state)


@dataclass(frozen=True, slots=True)
class ExportedPrefix:
    """What was kept under a ticket, as plain data."""

    ticket: int
    tensors: tuple[tuple[str, Tensor], ...]
    extra: str = ""


@dataclass(frozen=True, slots=True)
class RestorePrefix:
    """Keep what was handed out before, under new handles: blocks number `first` and on of those in the tensors, or a
    state."""

    tensors: tuple[tuple[str, Tensor], ...]
    extra: str = ""
    first: int = 0
    block: int = 0
    handles: tuple[int, ...] = ()
    state: int | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run `request.prompt[start:end]` into the request's own cache. The last prompt token is never prefilled:
    it is the first input of the decode step that the row joins once `end == len(prompt) - 1`."""

    request: Submit
    start: int
    end: int
    reuse: tuple[int, ...] = ()
    """In the first chunk only: the kept blocks that hold `request.prompt[:start]`."""
    reuse_checkpoint: int | None = None
    """In the first chunk only: the kept state after `request.prompt[:start]`."""
    save: SavePrefix | None = None
    """What to keep when the chunk has run."""

    @property
    def joins(self) -> bool:
        return self.end == len(self.request.prompt) - 1

    @property
    def continues_prompt(self) -> bool:
        """Whether there was a chunk before it."""
        return bool(self.start) and not self.reuse and self.reuse_checkpoint is None

    @property
    def saved_handles(self) -> tuple[int, ...]:
        """The handles of what is to be kept."""
        return () if self.save is None else self.save.all_handles


@dataclass(frozen=True, slots=True)
class EncodeMedia:
    """Encode a request's media from number `first` on, for about as long as reading `tokens` of a prompt takes. What a
    step leaves undone, the next one goes on with."""

    request: Submit
    first: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, as data: load, keep and drop first, then decode every row in the batch, and prefill these chunks.

    A row whose prefill is complete joins the batch at the next step. What is kept is taken from rows in the batch, also
    from those that are dropped in this step, and from prompts that are being read; what is forgotten is forgotten after
    that.
    """

    restore: tuple[RestorePrefix, ...] = ()
    save: tuple[SavePrefix, ...] = ()
    evict: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[int, ...] = ()
    encode: tuple[EncodeMedia, ...] = ()

    @property
    def may_span_steps(self) -> bool:
        """Whether what it reads may take some steps: a piece of one long prompt at most. Short ones should answer."""
        long = all(not chunk.joins or chunk.continues_prompt for chunk in self.prefill)
        return long and len(self.prefill) <= 1 and not self.encode


@dataclass(frozen=True, slots=True)
class RowOutput:
    """Tokens that a row produced since the last step that reported it. A backend may run a step behind."""

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A request that cannot go on, while all others can. It is dropped in the next step."""

    request_id: int
    message: str
    refused: bool = False
    """Whether what the client sent is the reason."""


@dataclass(frozen=True, slots=True)
class ChunkLogprobs:
    """Log-probabilities of the tokens that a chunk of a prompt has read, in order: see `Submit.prompt_logprobs`."""

    request_id: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    rows: tuple[RowOutput, ...] = field(default=())
    unsaved: tuple[int, ...] = ()
    """Handles of this plan that could not be kept or loaded."""
    exported: tuple[ExportedPrefix, ...] = ()
    exporting: bool = False
    """Whether there is more to hand out: then there must be another step, even an empty one."""
    prefilling: bool = False
    """Whether a chunk is computed in the next step as well: beside running rows, that one should have none, and a row
    whose prompt it ends does not join yet."""
    failed: tuple[RowFailure, ...] = ()
    prompt_logprobs: tuple[ChunkLogprobs, ...] = ()
    """Of chunks of this very step, and never later: a request that only reads its prompt ends with the last."""
    encoded: tuple[tuple[int, int], ...] = ()
    """Requests that were looked at, and how many of their media may be read now, counted from the first."""


Progress = Callable[[float], None]
"""Told how much is done, from 0 to 1."""


def ignore_progress(done: float) -> None:
    """For those who do not ask how far a load is."""


class GenerationBackend(Protocol):
    """A model that decodes many rows in one step. All methods are for the owner alone."""

    def load(self, report: Progress = ignore_progress) -> ModelFacts:
        """Owner only. Load the model here and evaluate all of it; tell `report` how far that is."""
        ...

    def errand(self, request: Submit | None) -> BackgroundTask | None:
        """Owner only. What must be done before this request may get a row, if anything: work for another thread, so it
        holds and touches nothing of MLX. For None, what is worth doing while the model loads."""
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


BackendFactory = Callable[[], GenerationBackend]
"""Called on the owner thread, so that importing MLX and making its stream happen there too."""
