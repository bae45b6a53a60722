"""Stream one answer from the server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from millstream.cli.chat.conversation import Conversation
from millstream.cli.server_client import ServerClient

PATH = "/v1/chat/completions"


class Display(Protocol):
    """Shows an answer while it arrives."""

    def reasoning(self, text: str) -> None: ...

    def content(self, text: str) -> None: ...

    def end(self) -> None:
        """No more comes. Called exactly once, whatever happened."""
        ...


@dataclass(slots=True)
class Answer:
    text: str = ""
    finish_reason: str | None = None
    stopped: bool = False
    """By the user."""
    tokens: int = 0
    prompt_tokens: int = 0
    first: float | None = None
    """Seconds until the first text or reasoning."""
    total: float = 0.0

    @property
    def summary(self) -> str:
        rate = self.tokens / (self.total - (self.first or 0.0)) if self.total > (self.first or 0.0) else 0.0
        first = "" if self.first is None else f", first after {self.first:.2f} s"
        return f"{self.prompt_tokens} prompt tokens, {self.tokens} tokens{first}, {rate:.1f} tokens/s"


def stream_answer(client: ServerClient, conversation: Conversation, display: Display) -> Answer:
    """Ctrl-C ends the answer: the connection is closed, and the server frees its row. What came so far is kept."""
    answer = Answer()
    started = time.monotonic()
    with _ending(display):
        try:
            events = cast("Any", client.stream(PATH, conversation.body(stream=True)))
            with closing(events):
                for event in events:
                    _take(event, answer, display, started)
        except KeyboardInterrupt:
            answer.stopped = True
    answer.total = time.monotonic() - started
    return answer


def _take(event: dict[str, Any], answer: Answer, display: Display, started: float) -> None:
    if usage := event.get("usage"):
        answer.tokens = usage["completion_tokens"]
        answer.prompt_tokens = usage["prompt_tokens"]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        content = delta.get("content")
        if answer.first is None and (reasoning or content):
            answer.first = time.monotonic() - started
        if reasoning:
            display.reasoning(reasoning)
        if content:
            answer.text += content
            display.content(content)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


@contextmanager
def _ending(display: Display) -> Iterator[None]:
    try:
        yield
    finally:
        display.end()
