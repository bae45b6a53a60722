"""Packs inputs of like length into one padded batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from millstream.engine.jobs.messages import TOKEN_BYTES, Encode

PAD_SHARE = 0.2
"""Most of a batch that may be padding, unless it is so small that its fixed cost outweighs it."""


@dataclass(slots=True)
class Job:
    """A request and those of its inputs that have not run."""

    submit: Encode
    pending: list[tuple[int, int]] = field(default_factory=list)
    """(length, index), shortest first."""
    tokens: int = 0
    """Of the pending inputs."""

    def __post_init__(self) -> None:
        self.pending = sorted((len(each) // TOKEN_BYTES, index) for index, each in enumerate(self.submit.inputs))
        self.tokens = sum(length for length, _ in self.pending)

    def take_at_most(self, length: int) -> tuple[int, int] | None:
        """The longest pending input of at most so many tokens, or None."""
        place = bisect_left(self.pending, (length + 1, -1)) - 1
        if place < 0:
            return None
        taken = self.pending.pop(place)
        self.tokens -= taken[0]
        return taken

    def put_back(self, taken: tuple[int, int]) -> None:
        insort(self.pending, taken)
        self.tokens += taken[0]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one batch may have."""

    tokens: int
    """With padding. One input may have more."""
    free_tokens: int = 0
    """Tokens that cost no more than the fixed cost of a step: so much padding is worth one step less."""


def pack(anchor: Job, others: Iterable[Job], limits: Limits) -> list[tuple[Job, int, int]]:
    """Takes inputs out of their jobs: (job, length, index), the longest first. The anchor's longest input sets the
    length. Then come its next ones, then those of the other jobs in their order."""
    batch: list[tuple[Job, int, int]] = []
    longest = real = 0
    for job in (anchor, *others):
        while True:
            taken = job.take_at_most(longest or anchor.pending[-1][0])
            if taken is None:
                break
            length, index = taken
            longest = longest or length
            padded = longest * (len(batch) + 1)
            padding = padded - real - length
            if batch and (padded > limits.tokens or padding > max(PAD_SHARE * padded, limits.free_tokens)):
                job.put_back(taken)
                break
            batch.append((job, length, index))
            real += length
        if longest * (len(batch) + 1) > limits.tokens:
            break
    return batch
