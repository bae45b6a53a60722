"""Fakes of the services behind a realtime session: they give what a test says, and tell what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from millstream.errors import NotFound
from millstream.model_facts import ModelCard
from millstream.realtime_types import ServerEvent
from millstream.speech_types import Segment, SpeechRequest, TranscriptionRequest, Voice
from millstream.types import Delta, FinishReason, GenerationRequest, Usage

WAIT = 60
T = TypeVar("T")

CARDS = (
    ModelCard("chat", created=1, state="ready", capabilities=("completion", "tools"), aliases=("gpt-realtime",)),
    ModelCard("ears", created=2, state="ready", capabilities=("transcription",), aliases=("whisper-1",)),
    ModelCard("voice", created=3, state="ready", capabilities=("speech",)),
)


class FakeWork:
    """Gives what is pushed. None ends it, an exception fails it."""

    def __init__(self, model: str, steps: Sequence[Any] = ()) -> None:
        self.model = model
        self.usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)
        self.duration = 1.0
        self.language = "en"
        self.sample_rate = 24_000
        self.cancelled = False
        self._steps: asyncio.Queue[Any] = asyncio.Queue()
        self.push(*steps)

    def push(self, *steps: Any) -> None:
        for step in steps:
            self._steps.put_nowait(step)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (step := await self._steps.get()) is not None:
            if isinstance(step, BaseException):
                raise step
            yield step

    def cancel(self, outcome: str = "cancelled") -> None:
        self.cancelled = True


@dataclass
class FakeService:
    """Makes a `FakeWork` per request. `steps` are what each gives at once; `error` fails the start."""

    steps: Sequence[Any] = ()
    script: list[Sequence[Any]] = field(default_factory=list)
    """Before `steps`: what the next requests give, one after the other."""
    error: Exception | None = None
    requests: list[Any] = field(default_factory=list)
    works: list[FakeWork] = field(default_factory=list)
    sample_rate: int = 24_000

    async def start(self, request: Any) -> Any:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        work = FakeWork(request.model, self.script.pop(0) if self.script else self.steps)
        work.sample_rate = self.sample_rate
        self.works.append(work)
        return work

    async def work(self, number: int) -> FakeWork:
        """The one with this number, once it was started."""
        await until(lambda: len(self.works) > number)
        return self.works[number]

    @property
    def all_cancelled(self) -> bool:
        return all(work.cancelled for work in self.works)


class FakeTranscriptions(FakeService):
    async def start(self, request: TranscriptionRequest) -> Any:
        return await super().start(request)


class FakeGenerations(FakeService):
    async def start(self, request: GenerationRequest) -> Any:
        return await super().start(request)

    async def count_tokens(self, request: GenerationRequest) -> int:
        return 1


class FakeSpeeches(FakeService):
    async def start(self, request: SpeechRequest) -> Any:
        return await super().start(request)

    async def voices(self, model: str) -> Sequence[Voice]:
        return [Voice("one")]


class FakeModels:
    def __init__(self, cards: Sequence[ModelCard] = CARDS) -> None:
        self.cards = cards

    def models(self) -> Sequence[ModelCard]:
        return self.cards

    def model(self, name: str) -> ModelCard:
        for card in self.cards:
            if not name or name in (card.name, *card.aliases):
                return card
        raise NotFound(f"the model {name!r} is not served here.", param="model")

    def healthy(self) -> dict[str, str]:
        return {card.name: card.state for card in self.cards}


class FakeOutbox:
    def __init__(self) -> None:
        self.events: list[ServerEvent] = []
        self.full = False

    def put(self, event: ServerEvent) -> None:
        self.events.append(event)

    async def room(self) -> None:
        await until(lambda: not self.full)

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    async def wait(self, kind: type[T], count: int = 1) -> T:
        """The event of a kind with this number, once it was sent."""
        await until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[count - 1]

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


async def until(true: Any) -> None:
    async with asyncio.timeout(WAIT):
        while not true():  # noqa: ASYNC110 - it may change on another thread
            await asyncio.sleep(0.001)


async def settle() -> None:
    """Lets tasks go on until they wait for something that does not happen by itself."""
    for _ in range(50):
        await asyncio.sleep(0)


def segment(text: str) -> Segment:
    return Segment(0.0, 1.0, text)


def said(text: str) -> Delta:
    return Delta(0, text)


END = Delta(0, finish_reason=FinishReason.STOP)


def sound(seconds: float, rate: int = 24_000) -> bytes:
    return np.full(int(seconds * rate), 0.25, np.float32).tobytes()


def pcm16(samples: np.ndarray[Any, Any]) -> bytes:
    return (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
