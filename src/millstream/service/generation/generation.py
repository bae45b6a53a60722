"""Runs one accepted generation request: every dialect iterates it, for streaming and non-streaming responses alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

from millstream.engine.generation.messages import Generated, PromptLogprobs, Tokens
from millstream.engine.messages import Failed, RequestEvent, Started
from millstream.errors import MillstreamError
from millstream.service.engine_client import EngineClient
from millstream.service.generation.choice import Choice
from millstream.service.generation.timing import RequestTimer
from millstream.service.inbox import Inbox, failure
from millstream.service.ports import DeltaSink
from millstream.types import Delta, Usage


class TextGeneration:
    """One accepted client request: one or more choices on one engine. Implements `ports.Generation`."""

    def __init__(
        self,
        model: str,
        engine: EngineClient,
        inbox: Inbox,
        choices: Sequence[Choice],
        prompt_tokens: int,
        timer: RequestTimer,
        per_prompt: int = 1,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`per_prompt`: choices of each prompt, which stand together. `on_end` may be called more than once."""
        self.model = model
        self.sampling = choices[0].submit.sampling
        self._engine = engine
        self._inbox = inbox
        self._choices = {choice.request_id: choice for choice in choices}
        self._prompt_tokens = prompt_tokens
        self._per_prompt = per_prompt
        self._cached: dict[int, int] = {}
        """By request: tokens of its prompt that it found in the prefix cache, and those that it never read."""
        self._skipped: dict[int, int] = {}
        self._proposed = self._accepted = 0
        self._timer = timer
        self._on_end = on_end
        inbox.on_started = self._started
        inbox.on_overflow(lambda: self.cancel("unread"))

    @property
    def usage(self) -> Usage:
        completion_tokens = reasoning_tokens = 0
        for choice in self._choices.values():
            completion_tokens += choice.completion_tokens
            reasoning_tokens += choice.reasoning_tokens
        accepted = min(self._accepted, completion_tokens)  # what follows a stop string is not part of the answer
        rejected = self._proposed - self._accepted
        return Usage(
            self._prompt_tokens,
            completion_tokens,
            self._of_prompts(self._cached),
            reasoning_tokens,
            accepted,
            rejected,
            self._of_prompts(self._skipped),
        )

    def _of_prompts(self, tokens: Mapping[int, int]) -> int:
        """From tokens by request to those of all prompts together. What one choice of a prompt has computed another may
        find in the cache, and yet it was computed."""
        least: dict[int, int] = {}
        for request_id, count in tokens.items():
            prompt = self._choices[request_id].index // self._per_prompt
            least[prompt] = min(count, least.get(prompt, count))
        return min(sum(least.values()), self._prompt_tokens)  # what closes a reasoning in a prompt is not counted

    def _started(self, event: Started) -> None:
        self._cached[event.request_id] = event.cached_tokens
        self._timer.started(self._of_prompts(self._cached))

    @property
    def _finish_reason(self) -> str:
        """Of all choices, in their order, each reason once."""
        reasons = (choice.finish_reason for choice in self._choices.values())
        return ", ".join(dict.fromkeys(reason for reason in reasons if reason is not None))

    def __aiter__(self) -> Self:
        """Not an async generator: the event loop would register each, to close it. Who iterates cancels in any case."""
        return self

    async def __anext__(self) -> Sequence[Delta]:
        try:
            while self._goes_on():
                deltas: list[Delta] = []
                for event in await self._inbox.take():
                    deltas += self._apply(event)
                if deltas:
                    self._timer.delivered(deltas)
                    return deltas
            if not self._timer.has_ended:
                self._timer.ended("finished", self.usage, self._finish_reason)
        except MillstreamError as error:
            self._timer.ended("failed", self.usage, error=error)
            self.cancel()
            raise
        except BaseException:
            self.cancel()
            raise
        self.cancel()
        raise StopAsyncIteration

    def _goes_on(self) -> bool:
        for choice in self._choices.values():  # noqa: SIM110 - `any` costs more than the loop
            if choice.finish_reason is None:
                return True
        return False

    def deliver_to(self, sink: DeltaSink) -> None:
        self._sink = sink
        self._inbox.deliver = self._deliver
        if len(self._choices) == 1:
            (self._only,) = self._choices.values()
            self._inbox.deliver_one = self._deliver_one

    def _deliver_one(self, request_id: int, token: int) -> bool:
        """The same as `_deliver` for a token of the only choice."""
        sink, choice = self._sink, self._only
        if choice.echoes or not sink.ready():
            return False
        self._timer.generated(1)
        if choice.plain:
            text = choice.push_plain(token)
            deltas = [Delta(choice.index, text)] if text else []
        else:
            deltas = self._ended(choice, choice.push((token,), ()))
            if choice.finish_reason is not None:
                self._inbox.wake()
        if deltas:
            self._timer.delivered(deltas)
            sink.deliver(deltas)
        return True

    def _deliver(self, events: list[RequestEvent]) -> list[RequestEvent]:
        """Gives tokens to the sink. The iteration gets the rest: ends, and what may be large."""
        if not self._sink.ready():
            return events
        deltas: list[Delta] = []
        taken = 0
        for event in events:
            choice = self._choices[event.request_id]
            if type(event) is not Tokens or event.logprobs or choice.echoes:
                break
            deltas += self._push(choice, event)
            if choice.finish_reason is not None:
                self._inbox.wake()
            taken += 1
        if deltas:
            self._timer.delivered(deltas)
            self._sink.deliver(deltas)
        return events[taken:]

    def cancel(self, outcome: str = "cancelled") -> None:
        """Safe at any time and more than once: the engine ignores the ids of requests that have ended."""
        self._engine.close_inbox(list(self._choices), self._inbox)
        if not self._timer.has_ended:
            self._timer.ended(outcome, self.usage)
        self._on_end()

    def _apply(self, event: RequestEvent) -> list[Delta]:
        choice = self._choices[event.request_id]
        match event:
            case Tokens():
                return self._push(choice, event)
            case PromptLogprobs():
                choice.add_prompt_logprobs(event.logprobs)
                return []
            case Generated():
                self._skipped[event.request_id] = event.usage.skipped_tokens
                return choice.finish(event.reason, event.usage.completion_tokens)
            case Failed():
                raise failure(event)
        return []

    def _push(self, choice: Choice, event: Tokens) -> list[Delta]:
        self._timer.generated(len(event.tokens))
        self._proposed += event.proposed
        self._accepted += event.accepted
        return self._ended(choice, choice.push(event.tokens, event.logprobs))

    def _ended(self, choice: Choice, deltas: list[Delta]) -> list[Delta]:
        """After tokens that may have ended the choice."""
        if choice.finish_reason is not None:
            self._engine.cancel([choice.request_id])
        return deltas
