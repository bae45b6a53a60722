"""A request inside a generation engine: its states, and the only moves between them."""

from __future__ import annotations

from enum import Enum, auto

from millstream.engine.generation.messages import Generate
from millstream.engine.prefix_cache.prompt import CachedPrompt
from millstream.types import Usage


class State(Enum):
    HELD = auto()
    """Outside the queue: its background task is not done."""
    FETCHING = auto()
    """Outside the queue: its prefix is being read from disk."""
    WAITING = auto()
    """In the queue."""
    PREFILLING = auto()
    """Has a row; chunks of its prompt are planned."""
    COMPLETING = auto()
    """Has a row; its last chunk is still being computed."""
    RUNNING = auto()
    """Has a row in the batch and decodes."""
    FINISHED = auto()
    FAILED = auto()


_ENDS = frozenset({State.FINISHED, State.FAILED})

MOVES: dict[State, frozenset[State]] = {
    State.HELD: frozenset({State.FETCHING, State.WAITING}) | _ENDS,
    State.FETCHING: frozenset({State.WAITING}) | _ENDS,
    State.WAITING: frozenset({State.PREFILLING}) | _ENDS,
    State.PREFILLING: frozenset({State.COMPLETING}) | _ENDS,
    State.COMPLETING: frozenset({State.RUNNING}) | _ENDS,
    State.RUNNING: _ENDS,
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
}


class IllegalMove(RuntimeError):
    """The scheduler tried a move that the table does not allow: a defect."""


class Request:
    """What the scheduler knows of one `Generate`."""

    __slots__ = ("arrived", "encoded", "generated", "prefilled", "prefix", "state", "submit", "tokens")

    def __init__(self, submit: Generate) -> None:
        self.submit = submit
        self.state = State.HELD
        self.arrived = 0.0
        """When it entered the queue, in seconds of steps."""
        self.prefilled = 0
        """Tokens of its prompt that are computed, or restored from the prefix cache."""
        self.encoded = 0
        """Media, counted from the first, that are encoded or part of the cached prefix."""
        self.generated = 0
        """Tokens that count as its output."""
        self.tokens: list[int] = []
        """All tokens that its row gave, including what ended it."""
        self.prefix = CachedPrompt(
            submit.request_id, submit.prompt, submit.contents, bypass=submit.prompt_logprobs is not None
        )

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def prefill_end(self) -> int:
        """The last prompt token is the first decode input, so it is not prefilled."""
        return len(self.submit.prompt) - 1

    @property
    def most_tokens(self) -> int:
        """The most tokens that its row may come to hold."""
        return len(self.submit.prompt) + self.submit.max_tokens

    @property
    def usage(self) -> Usage:
        return Usage(len(self.submit.prompt), self.generated, self.prefix.hit.tokens)

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
