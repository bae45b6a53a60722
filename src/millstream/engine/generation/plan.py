"""One step of generation as data: the plan that the scheduler makes, and the result that the backend returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from millstream.engine.generation.messages import Generate
from millstream.engine.generation.sparse_prompt import Spans, length
from millstream.engine.generation.speculation.choice import Odds, Outcome
from millstream.engine.prefix_cache.orders import ExportedPrefix, RestorePrefix, SavePrefix, SharePrefix
from millstream.engine.protocols import Backend
from millstream.model_facts import GenerationFacts
from millstream.types import TokenLogprob, quickly_made


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run `request.prompt[start:end]` into the request's own KV cache.

    The last prompt token is never prefilled: it is the first input of the decode step that the row joins once
    `end == len(prompt) - 1`.
    """

    request: Generate
    start: int
    end: int
    reuse: tuple[int, ...] = ()
    """In the first chunk only: the cached blocks that hold `request.prompt[:start]`."""
    reuse_checkpoint: int | None = None
    """In the first chunk only: the checkpoint after `request.prompt[:start]`."""
    save: SavePrefix | None = None
    """What to save once the chunk has run."""
    scores: bool = False
    """The draft model reads this chunk, to choose what the target reads: see `StepResult.importance`."""
    spans: Spans = ()
    """What the target reads from `start` to `end`; empty: all of it."""

    @property
    def joins(self) -> bool:
        """True for the last chunk of a prompt."""
        return not self.scores and self.end == len(self.request.prompt) - 1

    @property
    def tokens(self) -> int:
        """How many tokens it reads."""
        return length(self.spans) if self.spans else self.end - self.start

    @property
    def saved_handles(self) -> tuple[int, ...]:
        return () if self.save is None else self.save.all_handles


@dataclass(frozen=True, slots=True)
class EncodeMedia:
    """Encode a request's media from number `first` on, for about as long as prefilling `tokens` tokens takes. A later
    step continues what this one leaves undone."""

    request: Generate
    first: int
    tokens: int


@quickly_made
@dataclass(frozen=True, slots=True)
class Plan:
    """One step: restore, save and drop first, then decode every row in the batch, then prefill and encode.

    A row whose prefill is complete joins the batch in the next step. Prefixes are saved from rows in the batch,
    and from prompts in prefill, including those that this step drops. Evictions happen after saves.
    """

    restore: tuple[RestorePrefix, ...] = ()
    save: tuple[SavePrefix, ...] = ()
    evict: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[int, ...] = ()
    share: tuple[SharePrefix, ...] = ()
    """For rows that join in this step."""
    encode: tuple[EncodeMedia, ...] = ()
    complete_prefill: bool = False
    """True if this step must compute its chunks, and what is left of earlier ones, completely: short prompts, so that
    they answer soon. Otherwise the chunks may span several steps while rows decode."""
    prefill_parts: int | None = None
    """In how many steps, after this one, chunks that may span steps should be computed. None: as the backend likes."""
    drafts: tuple[tuple[int, int], ...] = ()
    """(request id, most tokens of a draft) of the rows that may speculate in this step. Empty: a plain step."""
    odds: Odds | None = None
    """Which pass pays for the drafts that there are. None: verify all of them."""
    tight: bool = False
    """True if the rows' KV caches may have no more vacant than `kv_capacity.spare_slots`: what is more is freed first.
    Otherwise it may be `KEPT_TOKENS` more."""
    guess: tuple[int, ...] = ()
    """In a plain step: rows whose drafts are only compared with what they go on to generate, where a draft costs no
    forward pass. See `StepResult.guessed`."""

    def __str__(self) -> str:
        return f"{len(self.decode)} rows, {len(self.prefill)} prompts"


@quickly_made
@dataclass(frozen=True, slots=True)
class RowOutput:
    """Tokens that a row produced since its last report. A backend may run one step behind."""

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    proposed: int = 0
    """How many tokens of a draft were verified in this step."""
    accepted: int = 0
    """How many of them the target chose as well. They are among `tokens`."""
    source: str = ""
    """Whose draft it was: see `speculation/sources.py`."""


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A request that cannot go on while all others can. The next step drops it."""

    request_id: int
    message: str
    refused: bool = False
    """True if the client's input is the reason."""


@dataclass(frozen=True, slots=True)
class ChunkLogprobs:
    """Log-probabilities of a chunk's tokens, in order: see `Generate.prompt_logprobs`."""

    request_id: int
    logprobs: tuple[TokenLogprob, ...]


@quickly_made
@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced."""

    rows: tuple[RowOutput, ...] = field(default=())
    unsaved: tuple[int, ...] = ()
    """Handles of this plan that could not be saved or restored."""
    exported: tuple[ExportedPrefix, ...] = ()
    exporting: bool = False
    """True if there is more to export: then another step must follow, even an empty one."""
    prefilling: bool = False
    """True if a chunk is still being computed. The next step should have none while rows run, and a row whose prompt
    the chunk completes does not join yet."""
    saving: bool = False
    """True if no chunk, but a prompt's saved blocks are still being copied. Its row may join, but had better wait."""
    shared: tuple[tuple[int, int], ...] = ()
    """(request id, how many of its tokens a row that joined reads in the prefix cache)."""
    failed: tuple[RowFailure, ...] = ()
    prompt_logprobs: tuple[ChunkLogprobs, ...] = ()
    """Of this step's chunks, never later: a request that only prefills ends with its last chunk."""
    encoded: tuple[tuple[int, int], ...] = ()
    """(request id, how many of its media are encoded, counted from the first)."""
    length: int = 1
    """Tokens per row of the decode pass; 1: a plain step."""
    pass_seconds: float = 0.0
    """Of a longer pass: what it and its drafts took, without the wait for the step before."""
    waited: bool = False
    """True if the step before was read first, to draft after it. Such a step takes another time than a plain one, even
    if no draft was verified."""
    asking_seconds: float = 0.0
    """What comparing drafts with plain steps took of this step, and asking for drafts of which none paid."""
    guessed: tuple[Outcome, ...] = ()
    """Of drafts that were compared, not verified: see `Plan.guess`."""
    importance: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(request id, how important the draft model finds each piece of a prompt that it has read)."""


GenerationBackend = Backend[Generate, Plan, StepResult, GenerationFacts]

GenerationBackendFactory = Callable[[], GenerationBackend]
