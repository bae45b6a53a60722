"""Turns the tokens of one choice into deltas: text, reasoning, tool calls and log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from millstream.engine.generation.messages import Generate
from millstream.service.generation.output_parsing import OutputParsing
from millstream.service.generation.prompt_echo import PromptEcho, text_logprob
from millstream.text.output.parts import Part, PartKind
from millstream.text.tokenizer import Tokenizer
from millstream.types import CallDelta, Delta, FinishReason, TextLogprob, TokenLogprob

_RANKS = {
    PartKind.REASONING: 0,
    PartKind.CONTENT: 1,
    PartKind.CALL: 2,
    PartKind.ARGUMENTS: 2,
    PartKind.VOID: 2,
}
"""The order of parts within a delta. Markup has no place in it."""


class Choice:
    """Detokenizes and parses one choice. It ends with exactly one finish reason."""

    def __init__(
        self,
        index: int,
        submit: Generate,
        tokenizer: Tokenizer,
        parsing: OutputParsing,
        *,
        continues: bool,
        prompt_echo: PromptEcho | None = None,
    ) -> None:
        """`continues`: the output continues the prompt's own text, so a leading space belongs to it.
        `prompt_echo`: what the first delta reports about the prompt."""
        self.index = index
        self.submit = submit
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._parsing = parsing
        self._detokenizer = tokenizer.detokenizer(continues=continues, shown=parsing.shown)
        self._parser = parsing.parser()
        self.plain = self._parser.plain
        """True if all output is content, and no text ends it."""
        self._min_tokens = submit.min_tokens
        self._parser.look_for_stops = not self._min_tokens
        self._per_token = parsing.chat_format is not None and parsing.chat_format.reasoning is not None
        self._calls = 0
        self._decoded_chars = 0
        self._emitted_chars = 0
        self._prompt_echo = prompt_echo
        self._echoed_chars = 0 if prompt_echo is None else prompt_echo.length
        self._logprob_sum = 0.0
        self._logprob_count = 0
        self._pending_logprobs: deque[tuple[int, TextLogprob]] = deque()
        """Log-probabilities whose text is not emitted yet, each with the number of characters decoded so far."""

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the generated tokens, if requested. A choice without tokens ranks last."""
        return self._logprob_sum / self._logprob_count if self._logprob_count else float("-inf")

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Adds the log-probabilities of the next prompt tokens."""
        if self._prompt_echo is not None:
            self._prompt_echo.add(logprobs)

    @property
    def echoes(self) -> bool:
        """True if the next delta says something about the prompt, which may be long."""
        return self._prompt_echo is not None

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[Delta]:
        """Returns no delta if there is nothing to emit yet, or if the choice has already ended."""
        if self.finish_reason is not None:
            return []
        if self.plain and not logprobs and self._prompt_echo is None:
            self.completion_tokens += len(tokens)
            text = self._detokenizer.push(tokens)
            return [Delta(self.index, text)] if text else []
        if logprobs or self._per_token or (len(tokens) > 1 and not self._parser.endless):
            parts = self._push_each(tokens, logprobs)
        else:
            self._count(len(tokens))
            parts = self._parser.push(self._detokenizer.push(tokens))
        return self._deltas(parts)

    def push_plain(self, token: int) -> str:
        """The text of a token of a choice that is `plain` and has not ended. Log-probabilities and echoes need
        `push`."""
        self.completion_tokens += 1
        return self._detokenizer.push((token,))

    def _push_each(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[Part]:
        """Parses token by token: this tells the text position of each log-probability, which tokens are reasoning, and
        which token ended the output."""
        parts: list[Part] = []
        for position, token in enumerate(tokens):
            self._count(1)
            piece = self._detokenizer.push((token,))
            was_in_reasoning = self._parser.in_reasoning
            parts += self._parser.push(piece)
            self.reasoning_tokens += was_in_reasoning or self._parser.in_reasoning
            self._decoded_chars += len(piece)
            if logprobs:
                logprob = logprobs[position]
                begin = self._echoed_chars + self._decoded_chars - len(piece)
                shown = text_logprob(self._tokenizer, logprob, offset=begin)
                self._pending_logprobs.append((self._decoded_chars, shown))
                self._logprob_sum += logprob.logprob
                self._logprob_count += 1
            if self._parser.ended:
                break
        if self._parsing.reasoning_budget is not None:  # what the engine writes to close it is not the model's
            self.reasoning_tokens = min(self.reasoning_tokens, self._parsing.reasoning_budget)
        return parts

    def _count(self, tokens: int) -> None:
        """Counts tokens that are parsed next. Stop strings are looked for in the text after the first `min_tokens`."""
        self.completion_tokens += tokens
        if self.completion_tokens > self._min_tokens:
            self._parser.look_for_stops = True

    def finish(self, reason: FinishReason, completion_tokens: int) -> list[Delta]:
        """Handles the end of the engine request. Emits the text held back, unless it completes a stop string."""
        if self.finish_reason is not None:
            return []
        self.completion_tokens = completion_tokens
        text = self._detokenizer.finish()
        self._decoded_chars += len(text)
        parts = self._parser.push(text)
        ended = self._parser.ended
        parts += self._parser.finish(cut=reason is not FinishReason.STOP)
        stopped = ended or self._parser.ended or reason is FinishReason.STOP
        self.finish_reason = self._stop_reason() if stopped else reason
        return self._deltas(parts)

    def _stop_reason(self) -> FinishReason:
        return FinishReason.TOOL_CALLS if self._parser.calls else FinishReason.STOP

    def _deltas(self, parts: Sequence[Part]) -> list[Delta]:
        """Returns the parts as deltas, in the order in which the model wrote them. Nearly always that is one."""
        if self.finish_reason is None and self._parser.ended:
            self.finish_reason = self._stop_reason()
        deltas: list[Delta] = []
        start = 0
        if len(parts) > 1:
            previous = 0
            for position, part in enumerate(parts):
                rank = _RANKS.get(part.kind, previous)
                if rank < previous:
                    self._add_delta(deltas, parts[start:position], None)
                    start = position
                previous = rank
        self._add_delta(deltas, parts[start:], self.finish_reason)
        return deltas

    def _add_delta(self, deltas: list[Delta], parts: Sequence[Part], finish_reason: FinishReason | None) -> None:
        """Adds the delta of parts in a delta's order. `finish_reason`: of the last one."""
        text = reasoning = ""
        calls: list[CallDelta] = []
        for part in parts:
            self._emitted_chars += len(part.source)
            match part.kind:
                case PartKind.CONTENT:
                    text += part.text
                case PartKind.REASONING:
                    reasoning += part.text
                case PartKind.CALL:
                    calls.append(CallDelta(self._calls, self._parsing.call_id(part.text, self._calls), part.text))
                    self._calls += 1
                case PartKind.ARGUMENTS:
                    calls.append(CallDelta(self._calls - 1, arguments=part.text))
                case PartKind.VOID:
                    calls.append(CallDelta(self._calls - 1, void=True))
        logprobs = self._take_logprobs() if self._pending_logprobs else ()
        if not (text or reasoning or calls or logprobs) and finish_reason is None:
            return
        stop_string = None if finish_reason is None else self._parser.stop_string
        delta = Delta(self.index, text, logprobs, finish_reason, (), reasoning, tuple(calls), stop_string)
        if self._prompt_echo is not None:
            delta, self._prompt_echo = self._prompt_echo.prepend_to(delta), None
        deltas.append(delta)

    def _take_logprobs(self) -> tuple[TextLogprob, ...]:
        """Returns the log-probabilities of tokens whose text has been emitted."""
        taken = []
        while self._pending_logprobs and self._pending_logprobs[0][0] <= self._emitted_chars:
            taken.append(self._pending_logprobs.popleft()[1])
        return tuple(taken)
