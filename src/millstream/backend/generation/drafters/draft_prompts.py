"""Reads the prompts of rows into a draft model's caches, a piece at a time, so that running rows are not stalled."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import mlx.core as mx

from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.prefill.prefiller import Prefiller
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill

FIRST, SHORTEST, LONGEST = 32, 16, 2048
"""Tokens of the first piece of all, before it is known what a token takes; of the shortest and the longest one."""


class DraftPrompts:
    """Owner only. One prompt after the other, in the order in which drafts were wanted."""

    def __init__(self, prefiller: Prefiller) -> None:
        self._prefiller = prefiller
        self._reading: dict[int, tuple[Generate, int]] = {}
        """A prompt as it was when its reading began, and how much of it is read."""
        self._token_seconds = 0.0
        """What a prompt token takes; 0 before the first piece."""

    @property
    def nbytes(self) -> int:
        return self._prefiller.nbytes

    def drop(self, ids: Iterable[int]) -> None:
        ended = [each for each in ids if self._reading.pop(each, None) is not None]
        if ended:
            self._prefiller.drop(ended)

    def read(self, prompts: Mapping[int, Sequence[int]], seconds: float) -> Iterator[tuple[int, int, JoiningRows]]:
        """Read on for about `seconds`. Yields what is complete: request id, tokens read, caches to join."""
        left = self._tokens_in(seconds)
        waiting = [
            *(each for each in self._reading if each in prompts),
            *(each for each in prompts if each not in self._reading),
        ]
        for each in waiting:
            if each not in self._reading:
                self._reading[each] = (Generate(each, tuple(prompts[each]), 1), 0)
            submit, start = self._reading[each]
            end = min(start + max(left, SHORTEST), len(submit.prompt) - 1)
            self._run(submit, start, end)
            left -= end - start
            if end == len(submit.prompt) - 1:
                del self._reading[each]
                _, joining = self._prefiller.take([each])
                yield each, end, joining[0]
            else:
                self._reading[each] = (submit, end)
            if left <= 0:
                return

    def _run(self, submit: Generate, start: int, end: int) -> None:
        began = time.monotonic()
        # Also a prompt of one token, of which nothing is read, gets its caches here.
        mx.eval(self._prefiller.prefill([Prefill(submit, start, end)]))
        if end - start >= SHORTEST:
            seconds = (time.monotonic() - began) / (end - start)
            known = self._token_seconds
            self._token_seconds = seconds if not known else 0.7 * known + 0.3 * min(seconds, 3 * known)

    def _tokens_in(self, seconds: float) -> int:
        if not self._token_seconds or not seconds:
            return FIRST
        return max(SHORTEST, min(LONGEST, int(seconds / self._token_seconds)))
