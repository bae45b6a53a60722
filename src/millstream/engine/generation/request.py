"""A request inside an engine: its states, and the only moves between them."""

from __future__ import annotations

from enum import Enum, auto

from millstream.engine.messages import Submit
from millstream.engine.prefix_cache.block_hash import BlockHashes
from millstream.engine.prefix_cache.index import Hit
from millstream.types import Usage


class State(Enum):
    WAITING = auto()
    PREFILLING = auto()
    RUNNING = auto()
    FINISHED = auto()
    FAILED = auto()


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.FINISHED, State.FAILED}),
    State.PREFILLING: frozenset({State.RUNNING, State.FINISHED, State.FAILED}),
    State.RUNNING: frozenset({State.FINISHED, State.FAILED}),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
}


class IllegalMove(RuntimeError):
    """The scheduler tried a move that the table does not allow: a defect."""


class Request:
    """What the scheduler knows of one `Submit`."""

    __slots__ = ("chain", "generated", "hit", "prefilled", "reported", "seen", "state", "stops", "submit")

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.state = State.WAITING
        self.prefilled = 0
        self.seen = 0
        """How many of its media may be read: encoded, or kept with the beginning of the prompt."""
        self.generated = 0
        self.reported: list[int] = []
        """What its row gave, where beginnings are kept: the answer, and what ended it."""
        self.stops: tuple[int, ...] = ()
        """Places of its prompt where a chunk must end, because the state is saved there."""
        self.hit = Hit()
        self.chain: BlockHashes | None = None
        """The names of its blocks on disk, as far as they were needed."""

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def prefill_end(self) -> int:
        """The last prompt token is the first decode input, so it is not prefilled."""
        return len(self.submit.prompt) - 1

    @property
    def most_tokens(self) -> int:
        """What its row may come to hold."""
        return len(self.submit.prompt) + self.submit.max_tokens

    @property
    def usage(self) -> Usage:
        return Usage(len(self.submit.prompt), self.generated, self.hit.tokens)

    @property
    def unseen(self) -> int | None:
        """The number of the next of its media that must be encoded."""
        media = self.submit.media
        while self.seen < len(media) and media[self.seen].start + media[self.seen].length <= self.prefilled:
            self.seen += 1
        return self.seen if self.seen < len(media) else None

    def reach(self, end: int, *, whole: bool) -> int:
        """How far a chunk may go that would go to `end`: not into media that are not encoded, and with `whole` not to a
        place inside of one, because there its tokens attend to each other."""
        unseen = self.unseen
        for number, media in enumerate(self.submit.media):
            beyond = media.start + media.length
            if beyond <= self.prefilled:
                continue
            if unseen is not None and number >= unseen:
                return min(end, max(self.prefilled, media.start))
            if whole and media.kind != "audio" and media.start < end < beyond:
                return media.start if media.start > self.prefilled else min(beyond, self.prefill_end)
        return end

    def move(self, to: State) -> None:
        if to not in MOVES[self.state]:
            raise IllegalMove(f"request {self.request_id}: {self.state.name} to {to.name}")
        self.state = to
