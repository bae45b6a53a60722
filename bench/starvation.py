"""Measure inter-token latency of running streams, alone and during the prefill of long prompts.

python bench/starvation.py --model random-tiny
python bench/starvation.py --model random-1b --long-words 1400
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys

import servers
from millstream.bench.client import Sample, stream
from millstream.bench.load import Load, request_body, watch_health
from millstream.bench.report import milliseconds, percentile
from models import find

STREAMS = 4


async def measure(
    load: Load, long_words: int, health: list[float | None]
) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """Samples of four streams alone, of four streams during long prompts sent in turn, and of the long prompts."""
    path = "/v1/chat/completions"
    short = dataclasses.replace(load, output_tokens=16)
    await asyncio.gather(*(stream(load.target, path, request_body(short, number)) for number in range(STREAMS)))
    long = dataclasses.replace(load, prompt_words=long_words, output_tokens=4)
    await stream(load.target, path, request_body(long, 50))
    alone = await asyncio.gather(*(stream(load.target, path, request_body(load, 100 + n)) for n in range(STREAMS)))
    running = [asyncio.create_task(stream(load.target, path, request_body(load, 200 + n))) for n in range(STREAMS)]
    watcher = asyncio.create_task(watch_health(load.target, health))
    await asyncio.sleep(0.5)  # the streams are decoding by then
    longs = []
    for number in range(3):
        if any(not task.done() for task in running):
            longs.append(await stream(load.target, path, request_body(long, 300 + number)))
    during = await asyncio.gather(*running)
    watcher.cancel()
    return alone, during, longs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-tiny")
    parser.add_argument("--servers", type=lambda text: text.split(","), default=["millstream", "mlx-lm"])
    parser.add_argument("--long-words", type=int, default=1450, help="about 8,000 tokens of the random models")
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--ours", default="")
    arguments = parser.parse_args()
    folder = find(arguments.model)
    for server, url, name in servers.each(arguments.servers, folder, arguments.ours):
        load = Load(
            url=url,
            model=name,
            prompt_words=20,
            output_tokens=arguments.output_tokens,
            ignore_eos=server == "millstream",
        )
        health: list[float | None] = []
        alone, during, longs = asyncio.run(measure(load, arguments.long_words, health))
        report(server, alone, during, longs)
        answered = [seconds for seconds in health if seconds is not None]
        print(f"{server}: /health p99 during long prompts {milliseconds(percentile(answered, 0.99))}")
    return 0


def report(server: str, alone: list[Sample], during: list[Sample], longs: list[Sample]) -> None:
    quiet = [gap for sample in alone for gap in sample.gaps]
    busy = [gap for sample in during for gap in sample.gaps]
    for sample in (*alone, *during, *longs):
        if sample.error:
            print(f"{server}: {sample.error}")
    p50, p99 = percentile(quiet, 0.5), percentile(busy, 0.99)
    print(f"{server}: gap alone p50 {milliseconds(p50)}, p99 {milliseconds(percentile(quiet, 0.99))}")
    busy_p50, worst = milliseconds(percentile(busy, 0.5)), milliseconds(percentile(busy, 1.0))
    print(f"{server}: gap during {len(longs)} long prompts p50 {busy_p50}, p99 {milliseconds(p99)}, worst {worst}")
    firsts = [sample.first for sample in longs if sample.first is not None]
    print(f"{server}: first token of a long prompt {milliseconds(percentile(firsts, 0.5))}")
    if p50 and p99:
        print(f"{server}: p99 beside / p50 alone = {p99 / p50:.2f}")


if __name__ == "__main__":
    sys.exit(main())
