"""The gaps between a chat's tokens, alone and beside many embeddings."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import httpx

import servers
from embedding_inputs import inputs
from millstream.bench.client import Sample, stream
from millstream.bench.load import Load, request_body
from millstream.bench.report import milliseconds, percentile

CHAT_STREAMS = 2
TOGETHER = 0.001
"""Seconds between chunks of one read."""


async def _chat(url: str, chat_model: str, embedder: str, count: int) -> tuple[list[float], list[float], float]:
    """Gaps of a chat alone, gaps beside embeddings, and how long these took."""
    load = Load(url=url, model=chat_model, prompt_words=20, output_tokens=300, ignore_eos=True)
    path = "/v1/chat/completions"

    async def talk(number: int) -> Sample:
        return await stream(load.target, path, request_body(load, number))

    await asyncio.gather(*(talk(number) for number in range(CHAT_STREAMS)))
    alone = [await talk(10 + number) for number in range(3)]
    beside: list[Sample] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        started = time.perf_counter()
        body = {"model": embedder, "input": inputs("mixed", count, 0)}
        embedding = asyncio.create_task(client.post("/v1/embeddings", json=body))
        while not embedding.done():
            beside.append(await talk(100 + len(beside)))
        (await embedding).raise_for_status()
        elapsed = time.perf_counter() - started
    return _gaps(alone), _gaps(beside), elapsed


def _gaps(samples: list[Sample]) -> list[float]:
    """Tokens that arrive together count as one."""
    return [gap for sample in samples for gap in sample.gaps if gap > TOGETHER]


def chat(folder: Path, chat_folder: Path, count: int) -> None:
    with servers.running("millstream", chat_folder, ("--isolation", "process"), more=(folder,)) as url:
        alone, beside, elapsed = asyncio.run(_chat(url, chat_folder.name, folder.name, count))
    median = statistics.median(alone)
    print(f"a chat's gaps alone: median {milliseconds(median)}, p99 {milliseconds(percentile(alone, 0.99))}")
    worst = percentile(beside, 0.99)
    middle = milliseconds(statistics.median(beside))
    print(f"beside {count} embeddings ({elapsed:.1f} s): median {middle}, p99 {milliseconds(worst)}")
    if worst is not None:
        print(f"p99 beside them is {worst / median:.1f} times the median alone")
