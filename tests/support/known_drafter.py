"""Drafts from answers that are known already, wrong at random: any acceptance can be had, with any model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from millstream.engine.generation.messages import Generate

ALPHABET = 64
"""Wrong tokens are below this."""


class KnownDrafter:
    """Implements `Drafter`. `answers`: what each request will generate, by its id. Each token of a draft is right with
    probability `right`; a row has a draft with probability `offer`, of a random length if `ragged`."""

    name = "known"

    def __init__(
        self,
        answers: Mapping[int, Sequence[int]],
        right: float = 0.8,
        *,
        offer: float = 1.0,
        ragged: bool = False,
        too_long: bool = False,
        cheap: bool = True,
        alphabet: int = ALPHABET,
        seed: int = 0,
    ) -> None:
        """`too_long`: drafts have more tokens than were asked for."""
        self.cheap = cheap
        self.right = right
        self.offer = offer
        self._answers = answers
        self._ragged = ragged
        self._too_long = too_long
        self._alphabet = alphabet
        self._draw = random.Random(seed)
        self.gained: dict[int, int] = {}
        """By request: tokens that it has."""
        self.proposals = 0

    def __len__(self) -> int:
        """Rows that it follows."""
        return len(self.gained)

    def join(self, submit: Generate) -> None:
        assert submit.request_id not in self.gained, "a row joined twice"
        self.gained[submit.request_id] = submit.resumed

    def drop(self, ids: set[int]) -> None:
        for request_id in ids:
            self.gained.pop(request_id, None)

    def commit(self, request_id: int, tokens: Sequence[int]) -> None:
        if request_id not in self.gained:
            return
        at = self.gained[request_id]
        answer = self._answers.get(request_id, ())
        expected = tuple(answer[at : at + len(tokens)])
        # An answer ends where its request ended; a row may have run further.
        assert tuple(tokens[: len(expected)]) == expected, f"request {request_id} gained {tokens}, not {expected}"
        self.gained[request_id] = at + len(tokens)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        found = {}
        for request_id, most in wanted.items():
            if request_id not in self.gained or self._draw.random() >= self.offer:
                continue
            count = self._draw.randint(1, most) if self._ragged else most + 3 * self._too_long
            at = self.gained[request_id]
            known = self._answers.get(request_id, ())[at : at + count]
            found[request_id] = tuple(map(self._maybe_wrong, known))
            self.proposals += 1
        return {request_id: draft for request_id, draft in found.items() if draft}

    def _maybe_wrong(self, token: int) -> int:
        if self._draw.random() < self.right:
            return token
        return (token + self._draw.randrange(1, self._alphabet)) % self._alphabet
