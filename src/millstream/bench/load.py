"""Generate load: concurrent streams, prompt and output lengths, arrival times."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, urlsplit

from millstream.bench.client import Exchange, Sample, ping
from millstream.bench.words import words

HEALTH_INTERVAL = 0.1


@dataclass(frozen=True, slots=True)
class Load:
    url: str
    model: str = ""
    api: str = "chat"
    prompt_words: int = 100
    shared_words: int = 0
    """Words in the prefix that all prompts share."""
    output_tokens: int = 128
    requests_per_stream: int = 2
    rate: float | None = None
    """Requests per second, as a Poisson process. None: each stream sends a request when its previous one has ended."""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    seconds: float | None = None
    """When a level is stopped, counted from its start. What has arrived until then counts."""

    @property
    def target(self) -> SplitResult:
        return urlsplit(self.url if "://" in self.url else f"http://{self.url}")

    def with_rate(self, rate: float | None) -> Load:
        return replace(self, rate=rate)


@dataclass(slots=True)
class Result:
    streams: int
    samples: list[Sample]
    health: list[float | None]


def request_body(load: Load, number: int) -> dict[str, object]:
    """The body of request `number`: the same in every run, different from all other requests."""
    shared = words(random.Random(load.seed), load.shared_words)
    own = words(random.Random(load.seed * 1_000_003 + number + 1), load.prompt_words)
    text = f"{shared} {number} {own}".strip()
    body: dict[str, object] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": load.output_tokens,
        "temperature": load.temperature,
        "top_p": load.top_p,
    }
    if load.model:
        body["model"] = load.model
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.api == "chat":
        return body | {"messages": [{"role": "user", "content": text}]}
    return body | {"prompt": text}


async def prepare(load: Load, streams: int, first_number: int = 0) -> list[Exchange]:
    """The first request of each stream, made and connected: streams that start together must be sent together, and a
    client that still connects when the first tokens arrive would time itself. None if requests come at random times."""
    if load.rate is not None:
        return []
    return list(await asyncio.gather(*(_open(load, first_number + index) for index in range(streams))))


async def _open(load: Load, number: int) -> Exchange:
    path = "/v1/chat/completions" if load.api == "chat" else "/v1/completions"
    return await Exchange.open(load.target, path, request_body(load, number))


async def run(
    load: Load,
    streams: int,
    done: Callable[[], None],
    *,
    first_number: int = 0,
    prepared: Sequence[Exchange] | None = None,
) -> Result:
    """Run one level of `streams` concurrent streams. `done` is called after each request. `prepared`: by `prepare`,
    which is called here if nobody has."""
    if prepared is None:
        prepared = await prepare(load, streams, first_number)
    total = streams * load.requests_per_stream
    samples: list[Sample] = []
    numbers = iter(range(first_number + len(prepared), first_number + total))
    now = asyncio.get_running_loop().time
    until = None if load.seconds is None else now() + load.seconds

    def in_time() -> Iterator[int]:
        """Numbers of further requests."""
        return itertools.takewhile(lambda _: until is None or now() < until, numbers)

    async def one(exchange: Exchange) -> None:
        samples.append(await exchange.run(Sample(0.0), until))
        done()

    async def one_stream(first: Exchange) -> None:
        await one(first)
        for number in in_time():
            await one(await _open(load, number))

    async def arrived(number: int) -> None:
        await one(await _open(load, number))

    health: list[float | None] = []
    watcher = asyncio.create_task(watch_health(load.target, health))
    if load.rate is None:
        await asyncio.gather(*(one_stream(first) for first in prepared))
    else:
        await _arrive(load.rate, load.seed, in_time(), arrived)
    watcher.cancel()
    return Result(streams, samples, health)


async def _arrive(rate: float, seed: int, numbers: Iterable[int], one: Callable[[int], Awaitable[None]]) -> None:
    """Send requests as a Poisson process: exponential gaps, independent of the server."""
    rng = random.Random(seed)
    tasks = []
    for number in numbers:
        tasks.append(asyncio.ensure_future(one(number)))
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.gather(*tasks)


async def watch_health(target: SplitResult, latencies: list[float | None]) -> None:
    """Append the latency of `/health`, or None if it failed, until cancelled."""
    while True:
        latencies.append(await ping(target))
        await asyncio.sleep(HEALTH_INTERVAL)
