"""The one generation use case: every dialect's streaming and non-streaming answers are this iteration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from millstream.engine.generation.messages import Generated, PromptLogprobs, Tokens
from millstream.engine.messages import Failed, RequestEvent
from millstream.errors import BadRequest, EngineGone, StepFailed
from millstream.service.engine_client import EngineClient
from millstream.service.generation.choice import Choice
from millstream.service.generation.metrics import RequestTimer
from millstream.service.inbox import Inbox
from millstream.types import Delta, FinishReason, Usage


class TextGeneration:
    """One accepted request of a client: one or more choices of one engine. See `ports.Generation`."""

    def __init__(
        self,
        model: str,
        engine: EngineClient,
        inbox: Inbox,
        choices: Sequence[Choice],
        prompt_tokens: int,
        timer: RequestTimer,
        next_id: Callable[[], int],
        context_length: int,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` may be called more than once."""
        self.model = model
        self._engine = engine
        self._inbox = inbox
        self._choices = {choice.request_id: choice for choice in choices}
        self._prompt_tokens = prompt_tokens
        self._cached = 0
        self._timer = timer
        self._next_id = next_id
        self._context_length = context_length
        self._on_end = on_end
        inbox.on_overflow(lambda: self.cancel("unread"))

    @property
    def usage(self) -> Usage:
        choices = set(self._choices.values())
        written = sum(choice.completion_tokens for choice in choices)
        thought = sum(choice.reasoning_tokens for choice in choices)
        return Usage(self._prompt_tokens, written, min(self._cached, self._prompt_tokens), thought)

    async def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        try:
            while any(choice.finish_reason is None for choice in self._choices.values()):
                deltas = [delta for event in await self._inbox.take() for delta in self._apply(event)]
                if deltas:
                    self._timer.delivered()
                    yield deltas
            self._timer.ended("finished", self.usage)
        finally:
            self.cancel()

    def cancel(self, outcome: str = "cancelled") -> None:
        """Safe at any time: what has ended is not asked again, and the engine ignores ids it no longer has."""
        self._engine.cancel(list(self._choices))
        self._timer.ended(outcome, self.usage)
        self._inbox.close()
        self._on_end()

    def _apply(self, event: RequestEvent) -> list[Delta]:
        choice = self._choices[event.request_id]
        if choice.request_id != event.request_id:
            # Its thoughts were closed by force, and another request goes on with it.
            if isinstance(event, Generated):
                self._cached += event.usage.cached_tokens
            return []
        deltas: list[Delta | None] = []
        match event:
            case Tokens():
                deltas = [choice.push(event.tokens, event.logprobs)]
                if choice.finish_reason is not None:
                    self._engine.cancel([choice.request_id])
                elif choice.over_budget:
                    deltas += self._close_thoughts(choice)
            case PromptLogprobs():
                choice.prompted(event.logprobs)
                return []
            case Generated():
                self._cached += 0 if choice.continued else event.usage.cached_tokens
                deltas = [choice.finish(event.reason, event.usage.completion_tokens)]
            case Failed():
                self._timer.ended("failed", self.usage)
                if event.refused:
                    raise BadRequest(event.message)
                raise EngineGone(event.message) if event.gone else StepFailed(event.message)
        return [delta for delta in deltas if delta is not None]

    def _close_thoughts(self, choice: Choice) -> list[Delta | None]:
        """The prompt, the thoughts so far and their end become a prompt of their own, most of it known already."""
        before = choice.request_id
        following = choice.close_thoughts(self._next_id(), self._context_length)
        if following is None:
            self._engine.cancel([before])
            return [choice.finish(FinishReason.LENGTH, 0)]
        self._choices[following.request_id] = choice
        self._engine.replace(before, following, self._inbox)
        return [choice.thoughts_closed()]
