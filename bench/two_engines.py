"""Measure two models in one server: do they overlap, and does the small one answer while the large one prefills?

    python bench/two_engines.py --large random-1b --small random-small
    python bench/two_engines.py --large random-mid --small random-tiny      (for the CPU)

Streams: the same requests to each model alone, then to both at once. If (large + small) / both is above 1, their work
overlaps. First token: the small model alone, and while the large one prefills a long prompt. With one engine for both,
it would wait for up to the whole prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

import servers
from millstream.bench.client import Sample, stream
from millstream.bench.load import Load, request_body, run
from millstream.bench.report import milliseconds
from models import find

PATIENCE = 600
FIRST_TOKENS = 5
"""Requests per repetition that measure the first token of the small model alone."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds for all streams."""

    large: float
    small: float
    both: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Times to first token in seconds. `during`: of requests to the small model during the large one's prefill."""

    alone: list[float]
    during: list[float]
    prefill: float


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def checked(samples: Iterable[Sample]) -> list[Sample]:
    found = list(samples)
    for sample in found:
        if sample.error is not None:
            sys.exit(f"a request failed: {sample.error}")
    return found


async def ask(load: Load, number: int) -> Sample:
    return checked([await stream(load.target, "/v1/chat/completions", request_body(load, number))])[0]


def seconds(samples: list[Sample]) -> float:
    return max(sample.ended for sample in samples) - min(sample.started for sample in samples)


async def streams(load: Load, count: int) -> list[Sample]:
    result = await run(load, count, lambda: None)
    return checked(result.samples)


async def overlap(large: Load, small: Load, count: int) -> Overlap:
    alone = [seconds(await streams(load, count)) for load in (large, small)]
    first, second = await asyncio.gather(streams(large, count), streams(small, count))
    return Overlap(alone[0], alone[1], seconds([*first, *second]))


async def first_token(long: Load, short: Load, number: int) -> FirstToken:
    """`number`: the first request number to use, so that no prompt is sent twice."""
    alone = [await ask(short, number + index) for index in range(FIRST_TOKENS)]
    undisturbed = await ask(long, number)
    prefill = undisturbed.arrivals[0] - undisturbed.started
    prefilling = asyncio.create_task(ask(long, number + 1))
    during = []
    await asyncio.sleep(min(0.05, prefill / 5))  # the large model is prefilling by then
    while not prefilling.done():
        during.append(await ask(short, number + FIRST_TOKENS + len(during)))
    prefilled_at = (await prefilling).arrivals[0]
    return FirstToken(
        [sample.arrivals[0] - sample.started for sample in alone],
        [sample.arrivals[0] - sample.started for sample in during if sample.started < prefilled_at],
        prefill,
    )


async def measure(large: Load, small: Load, arguments: argparse.Namespace) -> tuple[list[Overlap], list[FirstToken]]:
    long = dataclasses.replace(large, prompt_words=arguments.long_words, output_tokens=2)
    short = dataclasses.replace(small, output_tokens=2)
    say("warming up")
    await asyncio.gather(streams(large, arguments.streams), streams(small, arguments.streams))
    await ask(long, 1_000)
    overlaps, firsts = [], []
    for repetition in range(1, arguments.repeat + 1):
        say(f"repetition {repetition} of {arguments.repeat}: {arguments.streams} streams alone and together")
        overlaps.append(await overlap(large, small, arguments.streams))
        say(f"repetition {repetition} of {arguments.repeat}: first token during a long prefill")
        firsts.append(await first_token(long, short, 10_000 * repetition))
    return overlaps, firsts


def wait_until_ready(url: str, names: set[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as reply:
            states = {model["id"]: model["state"] for model in json.load(reply)["data"]}
        waiting = {name: states.get(name, "missing") for name in names if states.get(name) != "ready"}
        if not waiting:
            return
        if not {"failed", "missing"}.isdisjoint(waiting.values()):
            sys.exit(f"the server did not load {waiting}")
        time.sleep(0.2)
    sys.exit(f"not ready after {PATIENCE} s: {waiting}")


def report(overlaps: list[Overlap], firsts: list[FirstToken]) -> None:
    large, small, both = (median(getattr(one, name) for one in overlaps) for name in ("large", "small", "both"))
    alone = [value for one in firsts for value in one.alone]
    during = [value for one in firsts for value in one.during]
    prefill = [one.prefill for one in firsts]
    totals = Table("all streams, median", "large alone", "small alone", "both at once")
    totals.add_row("seconds", *(f"{value:.2f} s" for value in (large, small, both)))
    console = Console(width=110)
    console.print(totals)
    print(f"streams: (large + small) / both = {(large + small) / both:.2f}")
    first = Table("first token of the small model", "median", "worst")
    first.add_row("alone", *_times(alone))
    first.add_row(f"while the large one prefills ({len(during)} requests)", *_times(during))
    first.add_row("if it had to wait for the prefill", *_times(prefill))
    console.print(first)
    if during:
        print(f"first token: beside / alone = {median(during) / median(alone):.2f}")
        print(f"first token: waiting / beside = {median(prefill) / median(during):.2f}")


def _times(values: list[float]) -> tuple[str, str]:
    if not values:
        return "-", "-"
    return milliseconds(median(values) * 1000), milliseconds(max(values) * 1000)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", default="random-1b", help="a name from bench/models.py or a folder")
    parser.add_argument("--small", default="random-small", help="a name from bench/models.py or a folder")
    parser.add_argument("--streams", type=int, default=4, help="concurrent streams per model")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--long-words", type=int, default=1450, help="about 8,000 tokens of the random models")
    parser.add_argument("--isolation", choices=("auto", "thread", "process"), default="process")
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    folders = [find(arguments.large), find(arguments.small)]
    names = [folder.resolve().name for folder in folders]
    if names[0] == names[1]:
        sys.exit("the two models need different folder names, since requests use these names")
    say(f"starting one server for {' and '.join(names)}, isolation {arguments.isolation}")
    extra = ("--isolation", arguments.isolation)
    with servers.running("millstream", folders[0], extra, more=(folders[1],)) as url:
        wait_until_ready(url, set(names))
        loads = [
            Load(
                url=url,
                model=name,
                prompt_words=20,
                output_tokens=arguments.output_tokens,
                requests_per_stream=1,
                ignore_eos=True,
            )
            for name in names
        ]
        overlaps, firsts = asyncio.run(measure(loads[0], loads[1], arguments))
    report(overlaps, firsts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
