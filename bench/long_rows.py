"""The measurements of bench/long_contexts.py, one function each: the load is sent to one server, figures come back.

Times are in milliseconds. A request that fails raises `targets.Failure`: figures of a part of the load would mislead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from millstream.bench.client import Sample
from millstream.bench.report import percentile
from targets import Body, Running, Target, card

MEASURED_EVERY = 1.0
"""The server measures its memory once per second while it is busy."""
Figures = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work a run is."""

    short_streams: int = 64
    short_prompt: int = 100
    output_tokens: int = 128
    rounds: int = 5
    """How often the short streams are measured."""
    counts: tuple[int, ...] = (1, 2, 8, 16, 32)
    prompt: int = 8000
    beside_streams: int = 4
    beside_prompts: int = 5
    join_streams: int = 31
    join_prompt: int = 60_000
    join_output: int = 6000
    settle: float = 2.0
    """Seconds of undisturbed decoding before and after a prompt joins."""


SMALL = Sizes(
    short_streams=16,
    output_tokens=32,
    rounds=3,
    counts=(1, 2, 8),
    prompt=800,
    beside_streams=2,
    beside_prompts=3,
    join_streams=7,
    join_prompt=2000,
    join_output=3000,
)
"""For two CPU cores and a tiny model."""


def gaps(samples: Iterable[Sample], low: float, high: float) -> list[float]:
    """Gaps between tokens of which some part lies between the two times."""
    return [
        later - earlier
        for sample in samples
        for earlier, later in zip(sample.arrivals, sample.arrivals[1:], strict=False)
        if later > low and earlier < high
    ]


def tokens_held(samples: Iterable[Sample], prompt_tokens: int, at: float) -> int:
    """Tokens of these rows at a moment: a prompt each, and what had arrived by then."""
    return sum(prompt_tokens + sum(arrival <= at for arrival in sample.arrivals) for sample in samples)


def shorts(target: Target, sizes: Sizes, count: int, output_tokens: int) -> list[Body]:
    return [target.body(sizes.short_prompt, output_tokens) for _ in range(count)]


async def warm_up(target: Target, sizes: Sizes) -> None:
    await target.send_all(shorts(target, sizes, sizes.short_streams, 16))
    await target.send_all([target.body(sizes.prompt, 8)])


async def short_streams(target: Target, sizes: Sizes) -> float:
    """Tokens per second of all streams together, prompts included."""
    samples = await target.send_all(shorts(target, sizes, sizes.short_streams, sizes.output_tokens))
    seconds = max(sample.ended for sample in samples) - min(sample.started for sample in samples)
    return sum(sample.tokens for sample in samples) / seconds


async def queue(target: Target, count: int, sizes: Sizes) -> Figures:
    """`count` long prompts at once. Few are sent more than once, one lot after another."""
    firsts, rates = [], []
    for _ in range(max(1, 4 // count)):
        samples = await target.send_all([target.body(sizes.prompt, sizes.output_tokens) for _ in range(count)])
        firsts += [sample.arrivals[0] - sample.started for sample in samples]
        seconds = max(sample.arrivals[0] for sample in samples) - min(sample.started for sample in samples)
        rates.append(count * sizes.prompt / seconds)
    return {
        "first_p50": percentile(firsts, 0.5),
        "first_p99": percentile(firsts, 0.99),
        "prefill_tokens_per_second": median(rates),
    }


async def beside(target: Target, sizes: Sizes) -> Figures:
    """Streams alone, then beside one long prompt at a time."""
    prompts = [target.body(sizes.prompt, 1) for _ in range(sizes.beside_prompts)]
    longs: list[Sample] = []
    async with Running() as running:
        streams = await running.add(target, shorts(target, sizes, sizes.beside_streams, sizes.join_output))
        quiet_from = time.perf_counter()
        await asyncio.sleep(sizes.settle)
        quiet_to = time.perf_counter()
        for prompt in prompts:
            longs += await target.send_all([prompt])
            await asyncio.sleep(0.2)
        running.check()
    alone = percentile(gaps(streams, quiet_from, quiet_to), 0.5)
    busy = [gap for long in longs for gap in gaps(streams, long.started, long.arrivals[0])]
    firsts = [long.arrivals[0] - long.started for long in longs]
    during = percentile(busy, 0.99)
    return {
        "gap_alone_p50": alone,
        "gap_beside_p99": during,
        "beside_over_alone": during / alone if alone and during else None,
        "first_p50": percentile(firsts, 0.5),
    }


async def join(target: Target, sizes: Sizes) -> Figures:
    """Short streams, which one long prompt joins. The server must be new: its memory without rows is the base."""
    empty = await card(target.url)
    prompt = target.body(sizes.join_prompt, sizes.join_output)
    async with Running() as running:
        streams = await running.add(target, shorts(target, sizes, sizes.join_streams, sizes.join_output))
        quiet_from = time.perf_counter()
        await asyncio.sleep(sizes.settle)
        quiet_to = time.perf_counter()
        (long,) = await running.add(target, [prompt])
        joined = long.arrivals[0]
        await asyncio.sleep(sizes.settle + MEASURED_EVERY)
        full = await card(target.url)
        end = time.perf_counter()
        running.check()
    # Not more than the server held when it measured its memory, so the ratios are not flattered.
    held = tokens_held(streams, sizes.short_prompt, end - MEASURED_EVERY)
    held += tokens_held([long], sizes.join_prompt, end - MEASURED_EVERY)
    return {
        "gap_before_p50": percentile(gaps(streams, quiet_from, quiet_to), 0.5),
        "gap_during_p99": percentile(gaps(streams, long.started, joined), 0.99),
        "gap_during_max": percentile(gaps(streams, long.started, joined), 1.0),
        "gap_after_p50": percentile(gaps(streams, joined + 0.2, end), 0.5),
        "first": (joined - long.started) * 1000,
        **memory_figures(empty, full, held),
    }


def memory_figures(empty: dict[str, float], full: dict[str, float], held: int) -> Figures:
    """Memory that the rows took, over what their tokens need. Peers do not tell theirs."""
    result: Figures = {"tokens_held": held}
    if not full.get("kv_bytes_per_token") or "memory_bytes" not in empty:
        return result
    needed = held * full["kv_bytes_per_token"]
    added = full["memory_bytes"] - empty["memory_bytes"]
    cached = full["prefix_cache_bytes"] - empty["prefix_cache_bytes"]
    return result | {
        "kv_bytes": added - cached,
        "prefix_cache_bytes": cached,
        "kv_over_tokens": (added - cached) / needed,
        "kv_and_cache_over_tokens": added / needed,
    }
