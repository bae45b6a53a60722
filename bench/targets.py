"""A server to measure, streams that run on it, and what it says of its memory."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult

from millstream.bench.client import Sample, stream
from prompts import Prompts

PATH = "/v1/completions"
Body = dict[str, object]


class Failure(Exception):
    """A request failed or ended too early."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running server. `model` is its name in requests."""

    name: str
    url: SplitResult
    model: str
    prompts: Prompts

    def body(self, prompt_tokens: int, output_tokens: int) -> Body:
        """A request with a new prompt. To make a long one takes milliseconds: not while streams are measured."""
        body: Body = {
            "prompt": self.prompts.make(prompt_tokens),
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # Peers are asked by the name of the model, and do not know the other field.
        return body | ({"model": self.model} if self.model else {"ignore_eos": True})

    async def send(self, body: Body, sample: Sample | None = None) -> Sample:
        return await stream(self.url, PATH, body, sample)

    async def send_all(self, bodies: Iterable[Body]) -> list[Sample]:
        return checked(await asyncio.gather(*(self.send(body) for body in bodies)))


def checked(samples: Iterable[Sample]) -> list[Sample]:
    found = list(samples)
    for sample in found:
        if sample.error is not None:
            raise Failure(sample.error)
    return found


class Running:
    """Streams that decode until this context ends."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._tasks: list[asyncio.Task[Sample]] = []

    async def add(self, target: Target, bodies: Sequence[Body]) -> list[Sample]:
        """Start streams, and return once each has its first token."""
        new = [Sample(0.0) for _ in bodies]
        self.samples += new
        pairs = zip(bodies, new, strict=True)
        self._tasks += [asyncio.create_task(target.send(body, sample)) for body, sample in pairs]
        while not all(sample.arrivals for sample in new):
            self.check()
            await asyncio.sleep(0.005)
        return new

    def check(self) -> None:
        """Raises if a stream has ended: the rest would be measured without it."""
        for task in self._tasks:
            if task.done():
                raise Failure(task.result().error or "a stream ended too early: raise its number of tokens")

    async def __aenter__(self) -> Running:
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def card(url: SplitResult) -> dict[str, float]:
    """What the server says of its first model: nothing of its memory, if it is a peer."""

    def get() -> bytes:
        with urllib.request.urlopen(f"{url.geturl()}/v1/models", timeout=60) as reply:
            body: bytes = reply.read()
        return body

    cards: list[dict[str, float]] = json.loads(await asyncio.to_thread(get))["data"]
    return cards[0] if cards else {}
