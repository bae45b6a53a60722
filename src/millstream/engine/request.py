"""A request inside an engine: its states, and the only moves between them."""

from __future__ import annotations

from enum import Enum, auto

from millstream.engine.messages import Submit
from millstream.engine.prefix import Hit
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

    __slots__ = ("generated", "hit", "prefilled", "reported", "state", "stops", "submit")

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.state = State.WAITING
        self.prefilled = 0
        self.generated = 0
        self.reported: list[int] = []
        """What its row gave, where beginnings are kept: the answer, and what ended it."""
        self.stops: tuple[int, ...] = ()
        """Places of its prompt where a chunk must end, because the state is saved there."""
        self.hit = Hit()

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

    def move(self, to: State) -> None:
        if to not in MOVES[self.state]:
            raise IllegalMove(f"request {self.request_id}: {self.state.name} to {to.name}")
        self.state = to
