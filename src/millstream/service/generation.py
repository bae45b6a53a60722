"""The one generation use case: every dialect's streaming and non-streaming answers are this iteration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from millstream.engine.messages import Failed, Finished, PromptRead, Tokens
from millstream.errors import EngineGone, StepFailed
from millstream.service.choice import Choice
from millstream.service.engine_client import EngineClient
from millstream.service.inbox import Inbox, RequestEvent
from millstream.service.metrics import RequestTimer
from millstream.types import Delta, Usage


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
    ) -> None:
        self.model = model
        self._engine = engine
        self._inbox = inbox
        self._choices = {choice.request_id: choice for choice in choices}
        self._prompt_tokens = prompt_tokens
        self._cached = 0
        self._timer = timer

    @property
    def usage(self) -> Usage:
        written = sum(choice.completion_tokens for choice in self._choices.values())
        return Usage(self._prompt_tokens, written, min(self._cached, self._prompt_tokens))

    async def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        try:
            while any(choice.finish_reason is None for choice in self._choices.values()):
                deltas = [delta for event in await self._inbox.take() if (delta := self._apply(event)) is not None]
                if deltas:
                    self._timer.delivered()
                    yield deltas
            self._timer.ended("finished", self.usage)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Safe at any time: what has ended is not asked again, and the engine ignores ids it no longer has."""
        self._engine.cancel(list(self._choices))
        self._timer.ended("cancelled", self.usage)

    def _apply(self, event: RequestEvent) -> Delta | None:
        choice = self._choices[event.request_id]
        match event:
            case Tokens():
                delta = choice.push(event.tokens, event.logprobs)
                if choice.finish_reason is not None:
                    self._engine.cancel([choice.request_id])
                return delta
            case PromptRead():
                choice.prompted(event.logprobs)
                return None
            case Finished():
                self._cached += event.usage.cached_tokens
                return choice.finish(event.reason, event.usage.completion_tokens)
            case Failed():
                self._timer.ended("failed", self.usage)
                raise EngineGone(event.message) if event.gone else StepFailed(event.message)
