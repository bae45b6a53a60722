"""An agent's day: long conversations, each turn sent whole, interleaved with each other and with short streams.

    python bench/agents_day.py --out report/            8 conversations of 30,000 tokens and 32 short streams, for a GPU
    python bench/agents_day.py --small --out report/    for two CPU cores

Prints prefix cache hits and first-token times. With --out, writes figures.json and plot.svg, which shows memory,
first-token times and requests over time. With --before SRC, the same day with the build in that src/ folder, first.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from tokenizers import Tokenizer

import servers
from conversations import Conversation, Shape
from day_report import Day, Moment, Turn, plot, summary
from millstream.bench.client import stream
from models import find
from prompts import Prompts
from targets import Failure, Target, card, checked

PATH = "/v1/chat/completions"
SAMPLE_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    conversations: int = 8
    streams: int = 32
    stream_prompt: int = 100
    stream_output: int = 200
    pause: float = 0.5
    """Seconds that a tool takes between two turns of a conversation."""
    shape: Shape = field(default_factory=Shape)


SMALL = Sizes(3, 2, 50, 50, 0.5, Shape(tokens=2400, turns=4, system=400, answer=20))
"""For two CPU cores and a tiny model."""


async def live(url: SplitResult, folder: Path, sizes: Sizes) -> Day:
    """All conversations to their ends, beside short streams that never stop."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    target = Target("millstream", url, "", Prompts(folder, as_text=False))
    conversations = [Conversation(sizes.shape, tokenizer, number) for number in range(sizes.conversations)]
    day, empty, begun = Day(), await card(url), time.perf_counter()
    async with asyncio.TaskGroup() as background:
        endless = [background.create_task(watch(url, empty, day, begun))]
        endless += [background.create_task(short_streams(target, sizes, day)) for _ in range(sizes.streams)]
        async with asyncio.TaskGroup() as agents:
            for conversation in conversations:
                agents.create_task(talk(url, conversation, sizes, day, begun))
        for task in endless:
            task.cancel()
    return day


async def talk(url: SplitResult, conversation: Conversation, sizes: Sizes, day: Day, begun: float) -> None:
    await asyncio.sleep(sizes.pause / 2 * (1 + conversation.number))  # they do not begin at the same moment
    seen = 0
    for number in range(sizes.shape.turns):
        body: dict[str, object] = {
            "messages": conversation.ask(),
            "max_tokens": sizes.shape.answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        (sample,) = checked([await stream(url, PATH, body)])
        conversation.answered("".join(sample.text))
        first = sample.arrivals[0] - sample.started
        tokens = (sample.prompt_tokens, sample.cached_tokens, seen)
        day.turns.append(Turn(conversation.number, number, sample.started - begun, first, *tokens))
        seen = sample.prompt_tokens + sample.tokens
        await asyncio.sleep(sizes.pause)


async def short_streams(target: Target, sizes: Sizes, day: Day) -> None:
    """One short request after another, until cancelled."""
    while True:
        (sample,) = await target.send_all([target.body(sizes.stream_prompt, sizes.stream_output)])
        day.gaps += sample.gaps


async def watch(url: SplitResult, empty: Mapping[str, float], day: Day, begun: float) -> None:
    """Sample what the server says of itself, until cancelled. `empty`: the same before any request."""
    while True:
        now = await card(url)
        cached = now["prefix_cache_bytes"] - empty["prefix_cache_bytes"]
        kv_bytes = now["memory_bytes"] - empty["memory_bytes"] - cached
        day.moments.append(Moment(time.perf_counter() - begun, kv_bytes, cached, now["active"], now["waiting"]))
        await asyncio.sleep(SAMPLE_EVERY)


def main() -> int:
    arguments = parse()
    sizes, folder = sizes_of(arguments), find(arguments.model or ("random-mid" if arguments.small else "random-1b"))
    builds: dict[str, Path | None] = {"before": arguments.before} if arguments.before else {}
    days = {}
    for name, source in (builds | {"millstream": None}).items():
        print(f"starting {name}", file=sys.stderr, flush=True)
        with servers.running("millstream", folder, tuple(arguments.ours.split()), source=source) as url:
            try:
                days[name] = asyncio.run(live(urlsplit(url), folder, sizes))
            except ExceptionGroup as group:
                if (failed := group.subgroup(Failure)) is None:
                    raise
                sys.exit(f"{name}: a request failed: {innermost(failed)}")
    text = summary(days)
    print(text)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        content = {"sizes": dataclasses.asdict(sizes), "days": {name: dataclasses.asdict(days[name]) for name in days}}
        (arguments.out / "figures.json").write_text(json.dumps(content))
        (arguments.out / "report.md").write_text(text)
        (arguments.out / "plot.svg").write_text(plot(title(sizes), days))
    return 0


def innermost(error: BaseException) -> BaseException:
    """The first error of nested groups."""
    return innermost(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def title(sizes: Sizes) -> str:
    shape = sizes.shape
    return (
        f"{sizes.conversations} conversations of {shape.tokens:,} tokens in {shape.turns} turns, "
        f"beside {sizes.streams} short streams"
    )


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """The defaults, or the small ones, and what the command line sets."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    base = SMALL if arguments.small else Sizes()
    shape = {name: given[name] for name in Shape.__slots__ if name in given}
    own = {name: given[name] for name in Sizes.__slots__ if name in given}
    return dataclasses.replace(base, shape=dataclasses.replace(base.shape, **shape), **own)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="random-1b, with --small random-mid, or a folder")
    parser.add_argument("--small", action="store_true", help="a load for two CPU cores")
    parser.add_argument("--before", type=Path, help="also run the build in this src/ folder")
    parser.add_argument("--ours", default="", help="extra options for `millstream serve`")
    parser.add_argument("--out", type=Path, help="write figures.json, report.md and plot.svg to this folder")
    parser.add_argument("--conversations", type=int)
    parser.add_argument("--tokens", type=int, help="tokens of a conversation at its end")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--system", type=int, help="tokens of the system prompt that all conversations share")
    parser.add_argument("--answer", type=int, help="tokens of each answer")
    parser.add_argument("--streams", type=int, help="short streams beside them")
    parser.add_argument("--stream-prompt", type=int)
    parser.add_argument("--stream-output", type=int)
    parser.add_argument("--pause", type=float, help="seconds between two turns of a conversation")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
