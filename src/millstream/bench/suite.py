"""The measurements of `millstream bench --report`: throughput, first tokens, prefill, the prefix cache, and the gaps of
streams while a long prompt is prefilled. Each is bounded in time, so that a slow machine ends too."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from millstream.bench.client import Sample, stream
from millstream.bench.load import Load, request_body, run
from millstream.bench.report import figures, percentile
from millstream.errors import MillstreamError

LEVEL_SECONDS = 60.0
"""A level that takes longer is the last one."""
PROMPT_TOKENS = (512, 2048, 8192)
PROMPT_SECONDS = 15.0
"""A prompt that takes longer is the last one."""
BESIDE_STREAMS, BESIDE_TOKENS, FIRST_ARRIVALS = 4, 400, 20
"""Streams beside a long prompt, their tokens, and how many chunks of text each gets before the prompt is sent."""
SPARE_TOKENS = 64
"""Of the context, for the template and the answer."""

Say = Callable[[str], None]


class Suite:
    """Runs against one model of one server."""

    def __init__(self, load: Load, *, max_batch: int | None, context_length: int | None, say: Say) -> None:
        self._load = dataclasses.replace(load, ignore_eos=True)
        self._max_batch = max_batch
        self._context_length = context_length
        self._say = say
        self._numbers: Iterator[int] = itertools.count(20_000_000, 100_000)
        """The prompts of each measurement are its own: nothing comes from the prefix cache unless it should."""

    async def run(self, levels: Sequence[int]) -> dict[str, Any]:
        """All measurements, as JSON. Raises `MillstreamError` if the first request fails."""
        self._say("first request")
        first = await self._send(self._load, 8)
        if first.error is not None:
            raise MillstreamError(f"the server does not answer as expected: {first.error}")
        words_per_token = self._load.prompt_words / max(1, first.prompt_tokens)
        found: dict[str, Any] = {"levels": await self._levels(levels)}
        prompts = await self._prompts(words_per_token)
        found["prefill"] = [figures for figures, _ in prompts]
        if prompts:
            longest, words = prompts[-1]
            found["prefix_cache"] = await self._prefix_cache(words)
            found["beside_long_prompt"] = await self._beside(words, longest["seconds"])
        return found

    async def _levels(self, levels: Sequence[int]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for streams in levels:
            if found and (self._max_batch is not None and streams > self._max_batch):
                break
            self._say(f"{streams} streams")
            short = dataclasses.replace(self._load, requests_per_stream=1, output_tokens=8)
            await run(short, streams, lambda: None, first_number=next(self._numbers))
            started = time.monotonic()
            result = await run(self._load, streams, lambda: None, first_number=next(self._numbers))
            found.append(asdict(figures(result)))
            if time.monotonic() - started > LEVEL_SECONDS:
                break
        return found

    async def _prompts(self, words_per_token: float) -> list[tuple[dict[str, Any], int]]:
        """Seconds until the first token of prompts of growing length, alone; and the words of each."""
        found: list[tuple[dict[str, Any], int]] = []
        for tokens in PROMPT_TOKENS:
            if self._context_length is not None and tokens + SPARE_TOKENS > self._context_length:
                break
            self._say(f"a prompt of {tokens} tokens")
            words = max(1, int(tokens * words_per_token * 0.95))
            load = dataclasses.replace(self._load, prompt_words=words)
            samples = [await self._send(load, 1) for _ in range(2)]
            good = [sample for sample in samples if sample.error is None and sample.first]
            if not good:
                break
            best = min(good, key=lambda sample: sample.first or 0.0)
            seconds = best.first or 0.0
            rate = best.prompt_tokens / seconds
            found.append(({"tokens": best.prompt_tokens, "seconds": seconds, "tokens_per_second": rate}, words))
            if seconds > PROMPT_SECONDS:
                break
        return found

    async def _prefix_cache(self, words: int) -> dict[str, Any] | None:
        """The same prompt twice."""
        self._say("the prefix cache")
        load, number = dataclasses.replace(self._load, prompt_words=words), next(self._numbers)
        cold, warm = [await self._send(load, 2, number) for _ in range(2)]
        if cold.error or warm.error:
            return None
        return {
            "tokens": warm.prompt_tokens,
            "cached_tokens": warm.cached_tokens,
            "cold_seconds": cold.first,
            "warm_seconds": warm.first,
        }

    async def _beside(self, words: int, prompt_seconds: float) -> dict[str, Any] | None:
        """The gaps of some streams before a long prompt is sent and until its first token."""
        self._say("a long prompt beside streams")
        load = dataclasses.replace(self._load, output_tokens=BESIDE_TOKENS)
        running = [Sample(0.0) for _ in range(BESIDE_STREAMS)]
        tasks = [asyncio.ensure_future(self._send(load, BESIDE_TOKENS, sample=sample)) for sample in running]
        while not all(len(sample.arrivals) >= FIRST_ARRIVALS or sample.ended for sample in running):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        sent = time.perf_counter()
        long = await self._send(dataclasses.replace(self._load, prompt_words=words), 1)
        answered = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if long.error is not None or any(sample.error for sample in running):
            return None
        before = [gap for sample in running for gap in _gaps(sample, 0.0, sent)]
        during = [gap for sample in running for gap in _gaps(sample, sent, answered)]
        return {
            "streams": BESIDE_STREAMS,
            "prompt_tokens": long.prompt_tokens,
            "first_seconds": long.first,
            "first_seconds_alone": prompt_seconds,
            "gap_p50_before": percentile(before, 0.5),
            "gap_p50_during": percentile(during, 0.5),
            "gap_p99_during": percentile(during, 0.99),
            "gap_max_during": percentile(during, 1.0),
        }

    async def _send(
        self, load: Load, output_tokens: int, number: int | None = None, *, sample: Sample | None = None
    ) -> Sample:
        load = dataclasses.replace(load, output_tokens=output_tokens)
        path = "/v1/chat/completions" if load.api == "chat" else "/v1/completions"
        body = request_body(load, next(self._numbers) if number is None else number)
        return await stream(load.target, path, body, sample)


def _gaps(sample: Sample, started: float, ended: float) -> list[float]:
    """The gaps that end in a period."""
    pairs = itertools.pairwise(sample.arrivals)
    return [later - earlier for earlier, later in pairs if started <= later <= ended]
