"""One answer on its way from tokens to deltas."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from millstream.service.opening import Opening, describe
from millstream.text.stops import StopMatcher
from millstream.text.tokenizer import Tokenizer
from millstream.types import Delta, FinishReason, TextLogprob, TokenLogprob


class Choice:
    """Turns the engine's tokens into text, watches for stop strings, and ends in exactly one reason."""

    def __init__(
        self,
        index: int,
        request_id: int,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        *,
        continues: bool,
        opening: Opening | None = None,
    ) -> None:
        """`continues`: the answer goes on the prompt's own text, so a space at its beginning belongs to it.
        `opening`: what its first delta says of the prompt."""
        self.index = index
        self.request_id = request_id
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(continues=continues)
        self._stops = StopMatcher(stop) if stop else None
        self._decoded = 0
        self._emitted = 0
        self._opening = opening
        self._likely = 0.0
        self._scored = 0
        self._held: deque[tuple[int, TextLogprob]] = deque()

    @property
    def mean_logprob(self) -> float:
        """Of the tokens written, where log-probabilities are wanted. An answer without a token is the worst."""
        return self._likely / self._scored if self._scored else float("-inf")

    def prompted(self, logprobs: Sequence[TokenLogprob]) -> None:
        """More of the prompt was read."""
        if self._opening is not None:
            self._opening.add(logprobs)

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Delta | None:
        """None when there is nothing to show yet, or the choice has ended by itself (by a stop string)."""
        if self.finish_reason is not None:
            return None
        text = "".join(self._decode(tokens, logprobs)) if logprobs else self._detokenizer.push(tokens)
        self.completion_tokens += len(tokens)
        self._likely += sum(each.logprob for each in logprobs)
        self._scored += len(logprobs)
        if self._stops is not None:
            text = self._stops.push(text)
            if self._stops.matched is not None:
                self.finish_reason = FinishReason.STOP
        return self._delta(text)

    def finish(self, reason: FinishReason, completion_tokens: int) -> Delta | None:
        """The engine ended it. What was held back comes out, unless it completes a stop string."""
        if self.finish_reason is not None:
            return None
        self.finish_reason = reason
        self.completion_tokens = completion_tokens
        text = self._detokenizer.finish()
        self._decoded += len(text)
        if self._stops is not None:
            text = self._stops.push(text)
            if self._stops.matched is not None:
                self.finish_reason = FinishReason.STOP
            else:
                text += self._stops.finish()
        return self._delta(text)

    def _decode(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[str]:
        """Token by token, to know where in the text each log-probability belongs."""
        pieces = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            piece = self._detokenizer.push((token,))
            pieces.append(piece)
            self._decoded += len(piece)
            self._held.append((self._decoded, describe(self._tokenizer, logprob)))
        return pieces

    def _delta(self, text: str) -> Delta | None:
        self._emitted += len(text)
        shown = []
        while self._held and (self._held[0][0] <= self._emitted):
            shown.append(self._held.popleft()[1])
        if not text and not shown and self.finish_reason is None:
            return None
        delta = Delta(self.index, text, tuple(shown), self.finish_reason)
        opening, self._opening = self._opening, None
        return delta if opening is None else opening.before(delta)
