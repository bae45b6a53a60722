"""The forward passes that a head reads: which hidden state belongs to which token of which row."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from millstream.backend.generation.mtp.hidden_states import HiddenStates
from millstream.engine.generation.messages import Generate

BACKLOG = 16
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
class Pair:
    """Where a hidden state is, and which token of the row's output followed it."""

    hidden: int
    """In `Passes.states`."""
    output: int


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

    def states(self) -> mx.array:
        """All hidden states that are held: (number, size)."""
        flat = [each.hidden.reshape(-1, each.hidden.shape[-1]) for each in self._latest]
        return flat[0] if len(flat) == 1 else mx.concatenate(flat)

    def pairs(self, rows: Mapping[int, tuple[int, int, int]]) -> dict[int, list[Pair]]:
        """What each row has to read, in order. `rows`: request id to (the pass after which it joined, how many tokens
        it has generated, how many of these it has read)."""
        found: dict[int, list[Pair]] = {request_id: [] for request_id in rows}
        left = {request_id: generated for request_id, (_, generated, _) in rows.items()}
        start = sum(each.hidden.shape[0] * each.hidden.shape[1] for each in self._latest)
        for each in reversed(self._latest):
            start -= each.hidden.shape[0] * each.hidden.shape[1]
            for slot, request_id in enumerate(each.ids):
                if request_id is None or request_id not in rows or each.number <= rows[request_id][0]:
                    continue
                count = 1 if each.counts is None else each.counts[slot]
                left[request_id] -= count
                for index in reversed(range(count)):
                    output = left[request_id] + index
                    if output >= rows[request_id][2]:
                        found[request_id].append(Pair(start + slot * each.length + index, output))
        return {request_id: list(reversed(pairs[:MOST_PAIRS])) for request_id, pairs in found.items() if pairs}
