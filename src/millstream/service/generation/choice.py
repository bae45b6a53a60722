"""One answer on its way from tokens to deltas."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from millstream.engine.generation.messages import Generate
from millstream.service.generation.output_parsing import OutputParsing
from millstream.service.generation.prompt_echo import PromptEcho, describe
from millstream.text.parts import Part, PartKind
from millstream.text.tokenizer import Tokenizer
from millstream.types import CallDelta, Delta, FinishReason, TextLogprob, TokenLogprob


class Choice:
    """Turns the engine's tokens into text and its parts, and ends in exactly one reason."""

    def __init__(
        self,
        index: int,
        submit: Generate,
        tokenizer: Tokenizer,
        reading: OutputParsing,
        *,
        continues: bool,
        opening: PromptEcho | None = None,
    ) -> None:
        """`continues`: the answer goes on the prompt's own text, so a space at its beginning belongs to it.
        `opening`: what its first delta says of the prompt."""
        self.index = index
        self.submit = submit
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.over_budget = False
        """Whether its thoughts must be closed now: see `close_thoughts`."""
        self._tokenizer = tokenizer
        self._reading = reading
        self._detokenizer = tokenizer.detokenizer(continues=continues, shown=reading.shown)
        self._output = reading.output()
        self._one_by_one = reading.chat_format is not None and reading.chat_format.reasoning is not None
        self._written: list[int] = []
        self._before = 0
        """Tokens of requests that came before the engine's present one."""
        self._calls = 0
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

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def continued(self) -> bool:
        """Whether an earlier request of the engine began it."""
        return self._before > 0

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Delta | None:
        """None when there is nothing to show yet, or the choice has ended by itself."""
        if self.finish_reason is not None or self.over_budget:
            return None
        if logprobs or self._one_by_one or (len(tokens) > 1 and not self._output.endless):
            parts = self._push_each(tokens, logprobs)
        else:
            self.completion_tokens += len(tokens)
            parts = self._output.push(self._detokenizer.push(tokens))
        return self._delta(parts)

    def _push_each(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[Part]:
        """Token by token, to know where in the text each log-probability belongs, which tokens are thoughts, and with
        which of them the answer ended."""
        parts: list[Part] = []
        for place, token in enumerate(tokens):
            piece = self._detokenizer.push((token,))
            thought = self._output.in_reasoning
            parts += self._output.push(piece)
            self.completion_tokens += 1
            self.reasoning_tokens += thought or self._output.in_reasoning
            self._decoded += len(piece)
            if logprobs:
                self._held.append((self._decoded, describe(self._tokenizer, logprobs[place])))
                self._likely += logprobs[place].logprob
                self._scored += 1
            if self._reading.budget is not None:
                self._written.append(token)
                if self._output.in_reasoning and self.reasoning_tokens >= self._reading.budget:
                    self.over_budget = True
                    break
            if self._output.ended:
                break
        return parts

    def close_thoughts(self, request_id: int, context_length: int) -> Generate | None:
        """The request that goes on after them; None if there is no room for another token."""
        self.over_budget = False
        prompt = (*self.submit.prompt, *self._written, *self._reading.closing)
        room = min(self.submit.max_tokens - len(self._written), context_length - len(prompt))
        self._before = self.completion_tokens
        self._written.clear()
        if room < 1:
            return None
        self.submit = replace(
            self.submit,
            request_id=request_id,
            prompt=prompt,
            max_tokens=room,
            grammar=self._reading.answer_grammar,
        )
        return self.submit

    def thoughts_closed(self) -> Delta | None:
        """Reads the tokens that close the thoughts; the model did not write them, so they are not counted."""
        text = self._detokenizer.push(self._reading.closing)
        self._decoded += len(text)
        return self._delta(self._output.push(text))

    def finish(self, reason: FinishReason, completion_tokens: int) -> Delta | None:
        """The engine ended it. What was held back comes out, unless it completes a stop string."""
        if self.finish_reason is not None:
            return None
        self.completion_tokens = self._before + completion_tokens
        text = self._detokenizer.finish()
        self._decoded += len(text)
        parts = self._output.push(text)
        stopped = self._output.ended
        parts += self._output.finish()
        self.finish_reason = self._called() if stopped or self._output.ended or reason is FinishReason.STOP else reason
        return self._delta(parts)

    def _called(self) -> FinishReason:
        return FinishReason.TOOL_CALLS if self._output.calls else FinishReason.STOP

    def _delta(self, parts: Iterable[Part]) -> Delta | None:
        if self.finish_reason is None and self._output.ended:
            self.finish_reason = self._called()
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[CallDelta] = []
        for part in parts:
            self._emitted += len(part.source)
            match part.kind:
                case PartKind.CONTENT:
                    content.append(part.text)
                case PartKind.REASONING:
                    thoughts.append(part.text)
                case PartKind.CALL:
                    calls.append(CallDelta(self._calls, self._reading.call_id(part.text, self._calls), part.text))
                    self._calls += 1
                case PartKind.ARGUMENTS:
                    calls.append(CallDelta(self._calls - 1, arguments=part.text))
                case PartKind.VOID:
                    calls.append(CallDelta(self._calls - 1, void=True))
        shown = self._settled()
        text, reasoning = "".join(content), "".join(thoughts)
        if not (text or reasoning or calls or shown) and self.finish_reason is None:
            return None
        delta = Delta(
            self.index,
            text,
            shown,
            self.finish_reason,
            reasoning=reasoning,
            calls=tuple(calls),
            stop_string=self._output.stop_string,
        )
        opening, self._opening = self._opening, None
        return delta if opening is None else opening.before(delta)

    def _settled(self) -> tuple[TextLogprob, ...]:
        """Log-probabilities of the tokens whose text has been told."""
        shown = []
        while self._held and self._held[0][0] <= self._emitted:
            shown.append(self._held.popleft()[1])
        return tuple(shown)
