"""A request inside a generation engine: its states, and the only moves between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

from millstream.engine.generation.kv_budget import Phase, Row
from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.generation.plan import RowOutput
from millstream.engine.generation.sparse_prompt import SparsePrompt
from millstream.engine.prefix_cache.prompt import CachedPrompt
from millstream.types import FinishReason, TokenLogprob, Usage


class State(Enum):
    HELD = auto()
    """Outside the queue: its background task is not done."""
    FETCHING = auto()
    """Outside the queue: its prefix is being read from disk."""
    WAITING = auto()
    """In the queue: it is new, or was preempted."""
    PREFILLING = auto()
    """Has a row; chunks of its prompt are planned."""
    COMPLETING = auto()
    """Has a row; its last chunk is still being computed, or the prompt is being saved."""
    RUNNING = auto()
    """Has a row in the batch and decodes."""
    FINISHED = auto()
    FAILED = auto()


_ENDS = frozenset({State.FINISHED, State.FAILED})

MOVES: dict[State, frozenset[State]] = {
    State.HELD: frozenset({State.FETCHING, State.WAITING}) | _ENDS,
    State.FETCHING: frozenset({State.WAITING}) | _ENDS,
    State.WAITING: frozenset({State.PREFILLING}) | _ENDS,
    State.PREFILLING: frozenset({State.COMPLETING, State.WAITING}) | _ENDS,
    State.COMPLETING: frozenset({State.RUNNING, State.WAITING}) | _ENDS,
    State.RUNNING: frozenset({State.WAITING}) | _ENDS,
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
}


class IllegalMove(RuntimeError):
    """The scheduler tried a move that the table does not allow: a defect."""


class Request:
    """What the scheduler knows of one `Generate`."""

    __slots__ = (
        "accepted",
        "age",
        "arrived",
        "cached",
        "encoded",
        "generated",
        "in_batch",
        "logprobs_seen",
        "logprobs_sent",
        "prefilled",
        "prefix",
        "rejected",
        "saving",
        "shared",
        "sparse",
        "state",
        "submit",
        "tokens",
    )

    def __init__(self, submit: Generate, age: int = 0, sparse: SparsePrompt | None = None) -> None:
        """`age`: its number in the order of arrival; the oldest has the lowest. `sparse`: if its prompt may be read in
        part."""
        self.sparse = sparse
        self.submit = submit
        self.age = age
        self.state = State.HELD
        self.arrived = 0.0
        """When it entered the queue, in seconds of steps."""
        self.in_batch = False
        """True if a step was planned in which its row decodes."""
        self.cached: int | None = None
        """For a request that was preempted: its cached tokens when it started for the first time."""
        self.logprobs_sent = self.logprobs_seen = 0
        """Log-probabilities of its prompt: how many were sent, and how many were computed since its row started."""
        self.prefilled = 0
        """Tokens of its prompt that are computed, or restored from the prefix cache."""
        self.encoded = 0
        """Media, counted from the first, that are encoded or part of the cached prefix."""
        self.shared = 0
        """Tokens that its row reads in the prefix cache and does not hold."""
        self.saving = 0
        """If its prompt is complete and is saved before its row joins the batch: for so many steps now."""
        self.generated = 0
        """Tokens that count as its output."""
        self.accepted = self.rejected = 0
        """Tokens of drafts that became output, and that did not."""
        self.tokens: list[int] = []
        """All tokens that its row gave since it started, including what ended it."""
        self.prefix = _cached_prompt(submit)

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def prefill_end(self) -> int:
        """The last prompt token is the first decode input, so it is not prefilled."""
        return len(self.submit.prompt) - 1

    @property
    def work(self) -> int:
        """What is left to prefill, in tokens."""
        return self.work_after(self.prefilled)

    def work_after(self, position: int) -> int:
        """What there is to prefill once so many tokens are computed or cached."""
        end = self.prefill_end
        return end - position if self.sparse is None else self.sparse.work(position, end)

    def start(self, cached: int) -> None:
        """It gets a row, and the prefix cache has so many tokens of it. If few are left, all of them are read."""
        sparse = self.sparse
        if sparse is not None and sparse.kept is None and self.prefill_end - cached < sparse.facts.least:
            self.sparse = None
        self.prefix.partial = self.sparse is not None

    def select(self, importance: Sequence[float]) -> None:
        """The draft model has read its prompt: choose what the target reads."""
        if self.sparse is not None:
            self.sparse.select(importance, self.prefix.hit.tokens, self.prefill_end, self.submit.resumed)

    @property
    def skipped(self) -> int:
        """Tokens of its prompt that are never read."""
        return 0 if self.sparse is None else self.sparse.skipped(self.prefix.hit.tokens, self.prefill_end)

    @property
    def held_tokens(self) -> int:
        """The most that its KV cache may hold by now."""
        return len(self.submit.prompt) + len(self.tokens)

    @property
    def kv_row(self) -> Row:
        """What its KV cache holds, for the budget."""
        if self.state is not State.RUNNING:
            return Row(len(self.submit.prompt), Phase.PREFILLING)
        tokens = len(self.submit.prompt) + len(self.tokens) - self.shared
        return Row(tokens, Phase.DECODING if self.in_batch else Phase.JOINING)

    @property
    def usage(self) -> Usage:
        cached = self.prefix.hit.tokens if self.cached is None else self.cached
        return Usage(
            len(self.submit.prompt) - self.submit.resumed,
            self.generated,
            cached,
            accepted_prediction_tokens=self.accepted,
            rejected_prediction_tokens=self.rejected,
            skipped_tokens=self.skipped,
        )

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.submit.max_tokens - self.generated

    def preempt(self) -> None:
        """Its row is gone. It waits to start again, with a prompt that ends with what it has generated."""
        self.move(State.WAITING)
        if self.cached is None:
            self.cached = self.prefix.hit.tokens
        submit = self.submit
        prompt_done = self.logprobs_sent >= len(submit.prompt) - 1
        self.submit = replace(
            submit,
            prompt=(*submit.prompt, *self.tokens),
            resumed=submit.resumed + len(self.tokens),
            prompt_logprobs=None if prompt_done else submit.prompt_logprobs,
        )
        self.prefix = _cached_prompt(self.submit)
        if self.sparse is not None:
            self.sparse.restart()
        self.tokens = []
        self.in_batch = False
        self.saving = 0
        self.prefilled = self.encoded = self.logprobs_seen = self.shared = 0

    def accept(self, row: RowOutput) -> tuple[Tokens | None, FinishReason | None]:
        """What its row gave, cut at the first stop token or at the limit: the tokens to send, and why it ends, if it
        does. A stop token before `min_tokens` has probability 0; if rounding lets one through, it ends nothing."""
        submit, tokens = self.submit, row.tokens
        count = used = 0
        reason: FinishReason | None = None
        for token in tokens:
            used += 1
            self.generated += 1
            if token in submit.stop_tokens and self.generated > submit.min_tokens:
                reason = FinishReason.STOP
                break
            count += 1
            if self.generated >= submit.max_tokens:
                reason = FinishReason.LENGTH
                break
        self.tokens += tokens
        drafted: tuple[int, ...] = ()
        if row.proposed:
            # Accepted tokens are the last but one and those before it; some may come after the end.
            drafted = (row.proposed, max(0, row.accepted - max(0, len(tokens) - 1 - used)))
            self.accepted += drafted[1]
            self.rejected += drafted[0] - drafted[1]
        sent = Tokens(submit.request_id, tokens[:count], row.logprobs[:count], *drafted) if count else None
        return sent, reason

    def unsent(self, logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Of the log-probabilities of its next prompt tokens, those that were not sent before it was preempted."""
        known = min(self.logprobs_sent - self.logprobs_seen, len(logprobs))
        self.logprobs_seen += len(logprobs)
        self.logprobs_sent = max(self.logprobs_sent, self.logprobs_seen)
        return logprobs[known:]

    @property
    def next_media(self) -> int | None:
        """The number of the next of its media that must be encoded, if any."""
        media = self.submit.media
        while self.encoded < len(media) and media[self.encoded].start + media[self.encoded].length <= self.prefilled:
            self.encoded += 1
        return self.encoded if self.encoded < len(media) else None

    def chunk_end(self, end: int, *, whole_media: bool) -> int:
        """How far a chunk may go that would go to `end`: not into media that are not encoded. With `whole_media` it
        does not end inside an image either, because there its tokens attend to each other."""
        unencoded = self.next_media
        for number, media in enumerate(self.submit.media):
            beyond = media.start + media.length
            if beyond <= self.prefilled:
                continue
            if unencoded is not None and number >= unencoded:
                return min(end, max(self.prefilled, media.start))
            if whole_media and media.kind != "audio" and media.start < end < beyond:
                return media.start if media.start > self.prefilled else min(beyond, self.prefill_end)
        return end

    def move(self, to: State) -> None:
        if to not in MOVES[self.state]:
            raise IllegalMove(f"request {self.request_id}: {self.state.name} to {to.name}")
        self.state = to


def _cached_prompt(submit: Generate) -> CachedPrompt:
    bypass = submit.prompt_logprobs is not None
    return CachedPrompt(submit.request_id, submit.prompt, submit.contents, bypass=bypass)
