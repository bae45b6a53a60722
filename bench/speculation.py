"""What speculative decoding gains, over HTTP: the same requests with it and without, in turns, on one machine.

    python bench/speculation.py edit                         the demo model edits a file: drafts from the prompt
    python bench/speculation.py prose --streams 1 4 16       free prose, where nothing can be gained
    python bench/speculation.py code --model M --draft D     code, with a draft model

Answers are compared: they must be equal. A rate is that of decoding alone: from the first text of the first stream to
the end of the last. "By CPU time": what a token costs the server without speculation, over what it costs with it,
prompts included; where others compute too, this differs less from run to run. With --two-servers the requests without
speculation go to a server that has it off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import cpu_seconds
import servers
from millstream.bench.client import Sample, stream
from millstream.models.source import resolve

PATH = "/v1/chat/completions"

FILE = '''"""Prices of a shop: what an order costs, with discounts and shipping."""

from dataclasses import dataclass


@dataclass
class Item:
    name: str
    price: float
    weight: float = 0.0


@dataclass
class Order:
    items: list[Item]
    country: str = "DE"
    coupon: str = ""


RATES = {"DE": 0.19, "FR": 0.20, "IT": 0.22, "ES": 0.21}
SHIPPING = {"DE": 4.90, "FR": 9.90, "IT": 11.90, "ES": 12.90}


def subtotal(order: Order) -> float:
    total = 0.0
    for item in order.items:
        total += item.price
    return total


def discount(order: Order) -> float:
    if order.coupon == "TEN":
        return subtotal(order) * 0.10
    if order.coupon == "FIVE":
        return subtotal(order) * 0.05
    return 0.0


def shipping(order: Order) -> float:
    weight = sum(item.weight for item in order.items)
    base = SHIPPING[order.country]
    if weight > 10:
        return base * 2
    return base


def tax(order: Order) -> float:
    return (subtotal(order) - discount(order)) * RATES[order.country]


def price(order: Order) -> float:
    return subtotal(order) - discount(order) + shipping(order) + tax(order)


def main() -> None:
    order = Order([Item("lamp", 39.0, 2.5), Item("chair", 89.0, 8.0)])
    print(f"The order costs {price(order):.2f} euros")
'''

EDITS = (
    "Rename the function `price` to `total_price` everywhere.",
    "Add the country AT with a rate of 0.20 and shipping of 6.90.",
    "Rename the class `Item` to `Product` everywhere.",
)
CODE = (
    "Write a Python class for a binary search tree with insert, delete, find and an in-order iterator.",
    "Write a Python function that parses a CSV file with quoted fields, without the csv module, and unit tests for it.",
    "Write an LRU cache in Python with a doubly linked list, with type annotations and docstrings.",
)
PROSE = (
    "Write a story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child why the sky is blue and why sunsets are red.",
    "Describe a walk through an old town on a rainy morning in autumn.",
    "Write a letter to a friend about learning to play the violin.",
)


def prompts(task: str, number: int) -> str:
    if task == "edit":
        return f"{EDITS[number % len(EDITS)]} Answer with the whole file and nothing else.\n\n```python\n{FILE}```"
    texts = CODE if task == "code" else PROSE
    turn = number // len(texts)
    return texts[number % len(texts)] + (f" This is version {turn + 1}." if turn else "")


@dataclass(frozen=True, slots=True)
class Run:
    """One turn: all streams of it."""

    rate: float
    texts: list[str]
    tokens: int
    accepted: int
    rejected: int
    cpu: float | None
    """Seconds of CPU time per token, prompts included."""


async def run(url: SplitResult, task: str, args: argparse.Namespace, streams: int, turn: int, on: bool) -> Run:
    async def one(number: int) -> Sample:
        body: dict[str, object] = {
            "messages": [{"role": "user", "content": prompts(task, turn * streams + number)}],
            "max_tokens": args.tokens,
            "temperature": args.temperature,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not on:
            body["speculation"] = False
        return await stream(url, PATH, body)

    before = cpu_seconds.of_tree(servers.pids[url.geturl()])
    samples = await asyncio.gather(*(one(number) for number in range(streams)))
    after = cpu_seconds.of_tree(servers.pids[url.geturl()])
    for sample in samples:
        if sample.error is not None:
            sys.exit(f"a request failed: {sample.error}")
    seconds = max(sample.ended for sample in samples) - min(sample.arrivals[0] for sample in samples)
    tokens = sum(sample.tokens for sample in samples)
    return Run(
        (tokens - streams) / seconds,
        ["".join(sample.text) for sample in samples],
        tokens,
        sum(sample.accepted_tokens for sample in samples),
        sum(sample.rejected_tokens for sample in samples),
        None if before is None or after is None else (after - before) / tokens,
    )


async def compare(urls: tuple[SplitResult, SplitResult], args: argparse.Namespace, streams: int) -> None:
    """With and without in turns; which of them is first alternates too."""
    ratios, rates, gained, different = [], [], [0, 0, 0], 0
    costs: list[tuple[float, float]] = []
    await run(urls[0], args.task, args, streams, 0, True)  # both know the prompts of the first turn afterwards
    if urls[1] != urls[0]:
        await run(urls[1], args.task, args, streams, 0, False)
    for turn in range(args.turns):
        found: dict[bool, Run] = {}
        for on in (True, False) if turn % 2 else (False, True):
            found[on] = await run(urls[0] if on else urls[1], args.task, args, streams, turn % 3, on)
        ratios.append(found[True].rate / found[False].rate)
        rates.append((found[False].rate, found[True].rate))
        if found[True].cpu and found[False].cpu:
            costs.append((found[False].cpu, found[True].cpu))
        gained = [gained[0] + found[True].tokens, gained[1] + found[True].accepted, gained[2] + found[True].rejected]
        different += sum(one != other for one, other in zip(found[True].texts, found[False].texts, strict=True))
    off, on_rate = (statistics.median(column) for column in zip(*rates, strict=True))
    saved = f"{sum(cost for cost, _ in costs) / sum(cost for _, cost in costs):.3f}" if costs else ""
    print(
        f"| {args.task} | {streams} | {off:.1f} | {on_rate:.1f} | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) | {saved} | {gained[1]} of {gained[1] + gained[2]} drafted, "
        f"{gained[1] / max(1, gained[0]):.0%} of the text | {different} of {args.turns * streams} |",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("edit", "code", "prose"))
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--draft")
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=0, help="default: 600 for edit, 200 for others")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--two-servers", action="store_true")
    parser.add_argument("--serve", default="", help="more options for the server")
    args = parser.parse_args(arguments)
    args.tokens = args.tokens or (600 if args.task == "edit" else 200)
    model = Path(args.model) if args.model else resolve(None, report=print).path
    extra = (*(("--draft", args.draft) if args.draft else ()), *args.serve.split())
    with contextlib.ExitStack() as stack:
        url = urlsplit(stack.enter_context(servers.running("millstream", model, extra)))
        other = url
        if args.two_servers:
            other = urlsplit(stack.enter_context(servers.running("millstream", model, ("--speculation", "off"))))
        print(
            "| task | streams | off, tokens/s | on | on / off (range) | by CPU time | accepted | answers that differ |"
        )
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for streams in args.streams:
            asyncio.run(compare((url, other), args, streams))


if __name__ == "__main__":
    main()
