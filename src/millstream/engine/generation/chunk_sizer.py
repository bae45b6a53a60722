"""Decides how long a prefill chunk may be while rows decode, from measured step times.

While nobody waits long, a chunk may add half of the rows' own time to a step: a prompt then gets a third of the device
and running streams keep two thirds of their pace, whatever the model, the machine and the context length. When prompts
wait, chunks grow until a step takes as long as the longest gap that streams may have. Pure: it is told how long steps
took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from millstream.engine.generation.decode_cost import DecodeCost
from millstream.engine.generation.pass_cost import PassCost
from millstream.engine.generation.short_prompts import ShortPrompts

SHARE = 0.5
"""The share of the rows' own step time that a gentle chunk may add on average; single steps take longer."""

FREE_SHARE = 1.5
"""The share that it may add where a chunk's fixed cost is more than that: streams must still see less than three times
their usual gap."""

STRETCH = 2.5
"""How many decode steps a step may take that prefills short prompts while nobody waits long: streams must still see
less than three times their usual gap, and steps differ."""

GATHERING, GATHERING_GAPS = 10, 2
"""For how many decode steps, and longest gaps, short prompts may wait for others: each pass has a fixed cost."""

WAIT_SHARE, MOST_GAPS = 1 / 16, 10
"""Where the longest gap cannot be kept, a step may also take such a share of what the oldest prompt has waited for, up
to so many longest gaps: after 4 s, 0.25 s, and at most 0.5 s."""

LEAST_PARTS, MOST_PARTS, PRESSED_PARTS = 2, 8, 4
"""Steps that compute a chunk; and one that is longer than a gentle one, at most."""

MAX_GAP = 0.05
"""Seconds between two tokens of a stream that prefill may cause, by default."""

MARGIN = 0.9
"""How much of the longest gap a chunk is planned for: steps differ."""

_RISING = 0.5
_FALLING = 0.1


class ChunkSizer:
    """`least` and `most` bound a gentle chunk; if equal, they fix it. `longest` bounds a chunk under pressure.
    `free_seconds`: the time that a chunk may add to a step that is not much shorter itself. `fixed_seconds`: what one
    costs that a step completes, however short it is. `max_gap`: the longest step, in seconds, that a chunk under
    pressure may cause."""

    def __init__(
        self,
        *,
        most: int,
        least: int,
        longest: int | None = None,
        free_seconds: float = 0.0,
        fixed_seconds: float | None = None,
        max_gap: float = MAX_GAP,
        token_seconds: float | None = None,
        gentle_token_seconds: float | None = None,
        steps: Sequence[tuple[int, float]] = (),
        passes: Sequence[tuple[int, float]] = (),
    ) -> None:
        """`fixed_seconds`: None for `free_seconds`. `token_seconds`, `steps`: what a prompt token and decode steps of
        some rows were measured to cost at load; `gentle_token_seconds`: the token in a chunk of `most`, where fixed
        costs count for more. `passes`: what passes over short prompts cost, (tokens, seconds), on a device that can
        spread them over steps."""
        if not 1 <= least <= most <= (longest or most):
            raise ValueError("a chunk has at least one token, and `least`, `most` and `longest` are in ascending order")
        if not max_gap > 0:
            raise ValueError("the longest gap is a positive time")
        self.most = most
        self.least = least
        self.max_gap = max_gap
        self._longest = longest or most
        self._free_seconds = free_seconds
        self._fixed_seconds = free_seconds if fixed_seconds is None else fixed_seconds
        self.rows = 1
        """Rows of the step that is planned."""
        self.waited = 0.0
        """Seconds for which the oldest prompt has waited by then."""
        self._decode = DecodeCost(steps)
        """Of steps that only decode."""
        self.passes = PassCost(passes)
        """Of whole short prompts."""
        self._short = ShortPrompts(self._decode, self.passes, max_gap=max_gap, most_tokens=self._longest)
        self._decode_guess: float | None = None
        """The same, from steps that also prefill: until one was seen that does not."""
        self._fixed: float | None = None
        """What a step that completes prompts takes longer than its rows and tokens: less than the fixed cost of a
        chunk, as far as the host builds it while the device decodes."""
        self._last_fixed = self._fixed_seconds
        self._token: float | None = None
        """Seconds that a prompt token adds beside rows, over all steps that compute it."""
        self._token_alone = token_seconds
        self._slope: float | None = None
        """The same without the fixed cost of a chunk: what one more token adds to a long one."""
        self._last_slope = token_seconds
        self._gentle_token = gentle_token_seconds
        self._steps_per_chunk = 1
        """The most that one has taken."""
        self._last_tokens = 0.0
        self._skip = 0
        self._partial_steps: list[tuple[float, float]] = []

    @property
    def chunk(self) -> int:
        """The longest gentle chunk: a power of two times `least`, so that there are few shapes to compile."""
        return self.gentle_chunk()

    def gentle_chunk(self, weight: float = 1.0) -> int:
        """The same of a chunk whose first token costs so much, relative to the first ones of a prompt."""
        decode, token = self._costs()
        if not token:
            return self.most
        if self._token is None:
            token = max(token, self._gentle_token or 0.0)
        return self.at_most(min(self.most, self._gentle(decode) * self._steps_per_chunk / (weight * token)))

    def chunk_for(self, tokens_per_second: float, weight: float = 1.0, growth: float = 0.0) -> int:
        """The shortest chunk that prefills this fast, at least the gentle one; or the longest that keeps the gap.
        `weight`: what its first token costs, relative to the first ones of a prompt; those of the pace count as such.
        `growth`: by how much each further token costs more."""
        decode, token = self._costs()
        chunk = self.gentle_chunk(weight)
        if not token:
            return chunk
        steps, slope, fixed = min(self._steps_per_chunk, PRESSED_PARTS + 1), self._slope_cost(), self._chunk_fixed

        def pace(tokens: int) -> float:
            weighted = tokens * (weight + growth * tokens / 2)
            return weighted / (steps * decode + fixed + slope * weighted)

        def gap(tokens: int) -> float:
            # The step that builds a chunk evaluates nothing of one that spans several.
            added = fixed + slope * tokens * (weight + growth * tokens / 2)
            return decode + added / max(1, steps - 1)

        longest_step = MARGIN * self._longest_step(decode)
        while pace(chunk) < tokens_per_second and chunk * 2 <= self._longest and gap(chunk * 2) <= longest_step:
            chunk *= 2
        return chunk

    @property
    def at_once(self) -> int | None:
        """How many tokens one step may prefill completely, at least `least`. None if nothing is measured yet."""
        decode, token = self._costs()
        return self._tokens_in(self._longest_step(decode), decode) if token else None

    @property
    def is_slow(self) -> bool:
        """True if decode steps are so long that the longest gap bounds what is beside them, or nothing is known yet."""
        decode, token = self._costs()
        return not token or decode <= 0 or STRETCH * decode >= self.max_gap

    def decode(self, rows: int) -> float | None:
        """Seconds of a step of so many rows that only decodes."""
        return self._decode.seconds(rows)

    @property
    def short_prompts(self) -> ShortPrompts | None:
        """How short prompts share passes, where that is known; None: as `at_once` and `in_parts` allow."""
        return self._short if self.passes.known and self._decode.known and not self.is_slow else None

    @property
    def gathering(self) -> float:
        """Seconds for which short prompts may wait for others to share their pass with."""
        return min(GATHERING * self._costs()[0], GATHERING_GAPS * self.max_gap)

    def in_parts(self, tokens_per_second: float) -> int:
        """How many tokens of short prompts a chunk may have that spans steps, each of them a few decode steps long at
        most; or as fast as this pace, up to the longest gap."""
        decode, _ = self._costs()
        seconds, longest = STRETCH * decode, self._longest_step(decode)
        while True:
            tokens = self._tokens_in_parts(min(seconds, longest), decode)
            if seconds >= longest or tokens >= tokens_per_second * seconds * self._steps_per_chunk:
                return tokens
            seconds *= STRETCH

    def _tokens_in_parts(self, seconds: float, decode: float) -> int:
        steps = max(1, self._steps_per_chunk - 1)
        room = max(steps * (seconds - decode) - self._free_seconds, self._gentle(decode))
        return max(self.least, int(room / self._slope_cost()))

    def parts(self, tokens: float, *, gentle: bool = True, short: bool = False) -> int:
        """In how many steps a chunk should be computed, after the one that builds it. Each adds a share of a decode
        step; with `short` prompts, which should answer soon, about a whole one. `tokens`: what it costs, in the first
        tokens of a prompt. `gentle`: it is no longer than `gentle_chunk`."""
        decode, token = self._costs()
        if not token or decode <= 0:
            return LEAST_PARTS
        most = MOST_PARTS if short or gentle else PRESSED_PARTS
        seconds = self._free_seconds + self._slope_cost() * tokens
        return max(LEAST_PARTS, min(most, math.ceil(seconds / (decode if short else SHARE * decode))))

    def _longest_step(self, decode: float) -> float:
        """Seconds that a step may take at most because of prompts. Where even the shortest chunk makes it longer than
        the longest gap (a CPU), it is a few decode steps, and more if prompts wait long: else each step reads so few
        tokens that fixed costs exceed what streams gain, and the batch of a busy server stays nearly empty."""
        parts = max(1, min(self._steps_per_chunk - 1, PRESSED_PARTS))
        shortest = decode + (self._chunk_fixed + self.least * self._slope_cost()) / parts
        if shortest <= self.max_gap:
            return self.max_gap
        return max(STRETCH * decode, min(WAIT_SHARE * self.waited, MOST_GAPS * self.max_gap), self.max_gap)

    @property
    def _chunk_fixed(self) -> float:
        """Of a chunk that spans steps, as much as a decode step of a large model takes is hidden by those of the rows:
        both read the weights."""
        return self._fixed_seconds if self._steps_per_chunk == 1 else self._free_seconds

    @property
    def _fixed_cost(self) -> float:
        return self._chunk_fixed if self._fixed is None else self._fixed

    def _tokens_in(self, seconds: float, decode: float) -> int:
        """Tokens that a step of so many seconds completes; not less than a gentle chunk has."""
        room = max(seconds - decode - self._fixed_cost, self._gentle(decode))
        return max(self.least, int(room / self._slope_cost()))

    def at_most(self, tokens: float) -> int:
        """The longest usual length of a chunk that is not above `tokens`, or `least`."""
        chunk = self.least
        while chunk * 2 <= tokens:
            chunk *= 2
        return chunk

    def skip_steps(self) -> None:
        """The next observed step had other work as well: ignore it and the one after it."""
        self._skip = 2

    def observe(self, *, rows: int, prompt_tokens: float, seconds: float, prefilling: bool = False) -> None:
        """A step of `rows` rows that also prefilled `prompt_tokens`, weighted by what they cost, took `seconds`.
        `prefilling`: the next step goes on computing the same chunk, so all these steps count together.

        A backend may run ahead, so the cost of a chunk may show in the step after it: both are counted.
        """
        self._partial_steps.append((prompt_tokens, seconds))
        if prefilling and rows:
            return
        prompt_tokens = sum(tokens for tokens, _ in self._partial_steps)
        seconds = sum(seconds for _, seconds in self._partial_steps)
        steps = len(self._partial_steps)
        self._partial_steps = []
        tokens, self._last_tokens = (prompt_tokens + self._last_tokens) / 2, prompt_tokens
        if self._skip:
            self._skip -= 1
            return
        if seconds <= 0:
            return
        if rows:
            self._steps_per_chunk = max(self._steps_per_chunk, steps)
        if not rows:
            if prompt_tokens >= self.most:  # in a shorter one, fixed costs count for more than tokens
                self._token_alone = _follow(self._token_alone, seconds / prompt_tokens)
        elif not tokens:
            self._decode.observe(rows, seconds)
        elif (decode := self._decode.seconds(rows)) is not None:
            added = max(0.0, seconds - steps * decode)
            self._token = _follow(self._token, added / tokens)
            self._observe_slope(tokens, added)
            if steps == 1:
                self._observe_fixed(tokens, added)
        elif self._token_alone is not None and prompt_tokens:
            self._decode_guess = _follow(
                self._decode_guess, max(0.0, seconds - prompt_tokens * self._token_alone) / steps
            )

    def _costs(self) -> tuple[float, float]:
        """Seconds per decode step and per prompt token; 0 for a token if either is unknown."""
        decode = self._decode.seconds(self.rows) if self._decode.known else self._decode_guess
        token = self._token_alone if self._token is None else self._token
        return (0.0, 0.0) if decode is None or token is None else (decode, token)

    def _observe_slope(self, tokens: float, added: float) -> None:
        """Of a chunk long enough to tell. One slow step means nothing: the first one of its shape compiles kernels."""
        if tokens * (self._token_alone or 0.0) < self._chunk_fixed:
            return
        seen = max(0.0, added - self._chunk_fixed) / tokens
        usual = seen if self._last_slope is None else min(seen, self._last_slope)
        self._last_slope = seen
        self._slope = _follow(self._slope, usual)

    def _observe_fixed(self, tokens: float, added: float) -> None:
        """Of a chunk so short that its tokens hardly count. Again, one slow step means nothing."""
        if tokens * self._slope_cost() > self._chunk_fixed:
            return
        seen = max(0.0, added - self._slope_cost() * tokens)
        usual, self._last_fixed = min(seen, self._last_fixed), seen
        self._fixed = usual if self._fixed is None else self._fixed + _FALLING * (usual - self._fixed)

    def _slope_cost(self) -> float:
        """What one more token of a long chunk costs beside rows. Not less than alone, as far as that is known."""
        _, token = self._costs()
        slope = token if self._slope is None and self._token_alone is None else self._slope or 0.0
        return max(slope, self._token_alone or 0.0) or token

    def _gentle(self, decode: float) -> float:
        return max(SHARE * decode, min(self._free_seconds, FREE_SHARE * decode))


def _follow(known: float | None, seen: float) -> float:
    """Follow rising cost quickly and falling cost slowly: one fast step must not make the next chunk long."""
    if known is None:
        return seen
    return known + (_RISING if seen > known else _FALLING) * (seen - known)
