"""The forward passes that a head reads: which hidden state belongs to which token of which row."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from millstream.backend.generation.mtp.hidden_states import HiddenStates
from millstream.engine.generation.messages import Generate

BACKLOG = 32
"""Passes that are held while nobody drafts. What is older is left out: a head misses some tokens then, no more."""
MOST_PAIRS = 32
"""The most that a row reads at once; of more, the latest."""


class PassWatch(Protocol):
    """Owner only. Is told of a batch's forward passes."""

    def ran(self, ids: tuple[int | None, ...], length: int = 1) -> None:
        """A pass was built, of so many tokens per row. `ids`: the request of each of its rows."""
        ...

    def kept(self, counts: Sequence[int]) -> None:
        """How many tokens each row keeps of the pass that was built last, if that is not one each."""
        ...


class PromptWatch(Protocol):
    """Owner only. Is told of the prompts that are prefilled."""

    def read(self, submit: Generate, start: int, end: int, hidden: mx.array | None) -> list[mx.array]:
        """The hidden states (1, tokens, size) of `prompt[start:end]`, not evaluated, and perhaps of padding after it.
        Evaluate what it returns with the pass."""
        ...

    def take(self) -> mx.array | None:
        """The hidden states of the pass that was built last."""
        ...

    def forget(self, request_id: int) -> None:
        """A prompt that ends in prefill."""
        ...


@dataclass(slots=True)
class _Pass:
    number: int
    hidden: mx.array
    """(rows, length, size), or flat: (rows * length, 1, size)."""
    ids: tuple[int | None, ...]
    length: int
    counts: Sequence[int] | None = None
    """How many tokens each row has kept; None: one each."""


@dataclass(frozen=True, slots=True)
class Follow:
    """What is known of a row that wants to read its hidden states."""

    joined: int
    """The pass after which it joined the batch."""
    generated: int
    """How many tokens it has generated since then."""
    read: int
    """How many of them it has read."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """What some rows have to read: hidden states, and which token of a row's output followed each."""

    states: mx.array
    """(number, size)."""
    rows: dict[int, list[tuple[int, int]]]
    """By request, in order: (where it is in `states`, the number of the token in the row's output)."""


class Passes:
    """Owner only. The latest passes of a batch. Rows are found in them from the newest to the oldest, so a pass costs
    nothing until somebody asks."""

    def __init__(self, hidden: HiddenStates) -> None:
        self.hidden = hidden
        self.count = 0
        """How many there were."""
        self._latest: deque[_Pass] = deque(maxlen=BACKLOG)

    def ran(self, ids: tuple[int | None, ...], length: int = 1) -> None:
        hidden = self.hidden.take()
        self.count += 1
        if hidden is not None:
            self._latest.append(_Pass(self.count, hidden, ids, length))

    def kept(self, counts: Sequence[int]) -> None:
        if self._latest and self._latest[-1].number == self.count:
            self._latest[-1].counts = list(counts)

    def clear(self) -> None:
        self._latest.clear()
        self.hidden.take()

    def pairs(self, rows: Mapping[int, Follow]) -> Pairs | None:
        """What each row has to read, as far as it is held; None if nobody has anything. All passes of these rows must
        have been read: a row's tokens are counted from the last one."""
        left = {request_id: row.generated for request_id, row in rows.items()}
        found: dict[int, list[tuple[int, int]]] = {}
        walked: list[mx.array] = []
        start = 0
        for each in reversed(self._latest):
            waiting = {row for row, follow in rows.items() if left[row] > follow.read and each.number > follow.joined}
            if not waiting:
                break
            walked.append(each.hidden.reshape(-1, each.hidden.shape[-1]))
            for slot, request_id in enumerate(each.ids):
                if request_id is None or request_id not in waiting:
                    continue
                count = 1 if each.counts is None else each.counts[slot]
                left[request_id] -= count
                for index in reversed(range(count)):
                    if left[request_id] + index >= rows[request_id].read:
                        at = start + slot * each.length + index
                        found.setdefault(request_id, []).append((at, left[request_id] + index))
            start += walked[-1].shape[0]
        if not found:
            return None
        states = walked[0] if len(walked) == 1 else mx.concatenate(walked)
        return Pairs(states, {request_id: pairs[MOST_PAIRS - 1 :: -1] for request_id, pairs in found.items()})
