"""The gaps between a chat's tokens, alone and beside other work of the same server, each model in a process of its own.

A gap is the time between two chunks of text as the client receives them; all gaps count. The chat runs alone before and
after the work. Gaps count as beside it only if they end while the work runs. The chat model must take several
milliseconds per token: else chunks arrive together, and the figures mean nothing (they are shown).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

import servers
from millstream.bench.client import Sample, stream
from millstream.bench.load import Load, request_body
from millstream.bench.report import milliseconds, percentile

TALKS_ALONE = 3
"""Answers before the work, and as many after it."""
OUTPUT_TOKENS = 100
TOGETHER = 0.001
"""Seconds: chunks that are nearer to each other were sent or read together."""

Work = Callable[[httpx.AsyncClient], Awaitable[None]]
"""Sends requests to another model of the server, and raises if one fails."""


@dataclass(slots=True)
class Gaps:
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """For all of the work."""


async def _measure(url: str, chat_model: str, warm_up: Work, work: Work) -> Gaps:
    load = Load(url=url, model=chat_model, prompt_words=20, output_tokens=OUTPUT_TOKENS, ignore_eos=True)
    numbers = iter(range(10_000))

    async def talk() -> Sample:
        sample = await stream(load.target, "/v1/chat/completions", request_body(load, next(numbers)))
        if sample.error is not None:
            sys.exit(f"a chat failed: {sample.error}")
        return sample

    async def timed(client: httpx.AsyncClient) -> tuple[float, float]:
        started = time.perf_counter()
        await work(client)
        return started, time.perf_counter()

    found = Gaps()
    async with httpx.AsyncClient(base_url=url, timeout=1800) as client:
        await talk()
        await warm_up(client)
        before = [await talk() for _ in range(TALKS_ALONE)]
        working = asyncio.create_task(timed(client))
        during = []
        while not working.done():
            during.append(await talk())
        started, ended = await working
        after = [await talk() for _ in range(TALKS_ALONE)]
    found.seconds = ended - started
    found.alone = [gap for sample in (*before, *after) for gap in sample.gaps]
    found.beside = [gap for sample in during for gap in _between(sample, started, ended)]
    return found


def _between(sample: Sample, started: float, ended: float) -> list[float]:
    pairs = zip(sample.arrivals, sample.arrivals[1:], strict=False)
    return [later - earlier for earlier, later in pairs if earlier >= started and later <= ended]


def measure(chat_folder: Path, other: Path, warm_up: Work, work: Work) -> Gaps:
    """Serves both models and runs the work beside a chat."""
    with servers.running("millstream", chat_folder, ("--isolation", "process"), more=(other,)) as url:
        _check(url, {chat_folder.name, other.name})
        return asyncio.run(_measure(url, chat_folder.name, warm_up, work))


def report(gaps: Gaps, work: str) -> None:
    print("| a chat's gaps | median | p90 | p99 | largest | gaps | below 1 ms |")
    print("|---|---|---|---|---|---|---|")
    print(_line("alone", gaps.alone))
    print(_line(f"beside {work}", gaps.beside))
    worst = percentile(gaps.beside, 0.99)
    if worst is None:
        print("the work ended before the chat had two tokens: take more of it")
    else:
        print(f"p99 beside it is {worst / 1000 / statistics.median(gaps.alone):.1f} times the median alone")


def _line(name: str, gaps: Sequence[float]) -> str:
    shown = " | ".join(milliseconds(percentile(gaps, share)) for share in (0.5, 0.9, 0.99, 1.0))
    together = sum(gap < TOGETHER for gap in gaps) / max(len(gaps), 1)
    return f"| {name} | {shown} | {len(gaps)} | {together:.0%} |"


def _check(url: str, names: set[str]) -> None:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as reply:
        states = {model["id"]: model["state"] for model in json.load(reply)["data"]}
    if wrong := {name: states.get(name, "missing") for name in names if states.get(name) != "ready"}:
        sys.exit(f"the server did not load {wrong}")
