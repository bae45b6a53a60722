"""Long contexts, many at once: memory, first tokens and gaps, of Millstream, an older build of it and peers.

    python bench/long_contexts.py --before ../older/src --peer mlx-lm --out report/      (a GPU)
    python bench/long_contexts.py --small                                                (two CPU cores)

Four rows: `join`, short streams that one long prompt joins; `queue`, long prompts at once; `beside`, streams beside one
long prompt; `short`, many short streams. All servers are up at once and take turns, so that a slow minute of the
machine hits each of them. `join` has each server to itself, newly started: it needs the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import platform
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import long_rows
import servers
from long_rows import SMALL, Figures, Sizes
from long_table import Results, table
from models import find
from prompts import Prompts
from targets import Failure, Target

ROWS = ("short", "queue", "beside", "join")
OURS, BEFORE = "millstream", "before"


def main() -> int:
    arguments = parse()
    sizes, folder = sizes_of(arguments), find(arguments.model or ("random-mid" if arguments.small else "random-1b"))
    results: Results = {}
    together = [row for row in ROWS if row in arguments.rows and row != "join"]
    if together:
        with ExitStack() as stack:
            started = [stack.enter_context(serving(name, folder, arguments)) for name in arguments.servers]
            targets = [target for target in started if target is not None]
            asyncio.run(measure_together(targets, together, sizes, arguments.peer_rows, results))
    for name in arguments.servers if "join" in arguments.rows else ():
        if takes_part(name, "join", arguments.peer_rows):
            with serving(name, folder, arguments) as target:
                if target is not None:
                    asyncio.run(attempt(results, "join", target, long_rows.join(target, sizes)))
    text = table(results, sizes, arguments.servers)
    print(text)
    print(json.dumps(results))
    if arguments.out is not None:
        write(arguments.out, results, sizes, text)
    return 1 if any("error" in figures.get(OURS, {}) for figures in results.values()) else 0


def takes_part(name: str, row: str, peer_rows: Sequence[str]) -> bool:
    return name in (OURS, BEFORE) or row in peer_rows


@contextmanager
def serving(name: str, folder: Path, arguments: argparse.Namespace) -> Iterator[Target | None]:
    """Start a server. Yields None for a peer that does not start."""
    ours = name in (OURS, BEFORE)
    options = {OURS: arguments.ours, BEFORE: arguments.before_options}
    extra = tuple(options.get(name, "").split())
    source = arguments.before if name == BEFORE else None
    say(f"starting {name}")
    with ExitStack() as stack:
        target = None
        try:
            url = stack.enter_context(servers.running(OURS if ours else name, folder, extra, source=source))
            prompts = Prompts(folder, as_text=not ours, seed=arguments.seed)
            target = Target(name, urlsplit(url), "" if ours else str(folder), prompts)
        except servers.NotStarted as error:
            if ours:
                raise
            say(f"{name} is left out: {error}")
        yield target


async def measure_together(
    targets: Sequence[Target], rows: Sequence[str], sizes: Sizes, peer_rows: Sequence[str], results: Results
) -> None:
    for target in targets:
        await attempt(results, "warm-up", target, long_rows.warm_up(target, sizes))
    for row in rows:
        some = [target for target in targets if takes_part(target.name, row, peer_rows)]
        if row == "short":
            await measure_short(some, sizes, results)
        elif row == "beside":
            for target in some:
                await attempt(results, row, target, long_rows.beside(target, sizes))
        else:
            for count, target in itertools.product(sizes.counts, some):
                await attempt(results, f"{row} {count}", target, long_rows.queue(target, count, sizes))


async def measure_short(targets: Sequence[Target], sizes: Sizes, results: Results) -> None:
    """The servers take turns, and every other round in the opposite order."""
    rates: dict[str, list[float]] = {target.name: [] for target in targets}

    async def once(target: Target) -> Figures:
        rates[target.name].append(await long_rows.short_streams(target, sizes))
        seen = rates[target.name]
        return {"tokens_per_second": median(seen), "slowest": min(seen), "fastest": max(seen)}

    for number in range(sizes.rounds):
        for target in targets if number % 2 == 0 else reversed(targets):
            await attempt(results, "short", target, once(target))


async def attempt(results: Results, row: str, target: Target, measured: Awaitable[Figures | None]) -> None:
    """Await the figures, and note an error in their place: the other rows and servers still count."""
    say(f"{row}: {target.name}")
    try:
        figures = await measured
    except Failure as error:
        say(f"{row}: {target.name} failed: {error}")
        results.setdefault(row, {})[target.name] = {"error": str(error)}
    else:
        if figures is not None:
            results.setdefault(row, {})[target.name] = {**figures}
            say(f"{row}: {target.name}: {json.dumps(figures)}")


def write(out: Path, results: Results, sizes: Sizes, text: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    content = {"sizes": dataclasses.asdict(sizes), "results": results}
    (out / "figures.json").write_text(json.dumps(content, indent=2))
    (out / "report.md").write_text(f"`{' '.join(sys.argv)}` on {platform.platform()}\n\n{text}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """The defaults, or the small ones, and what the command line sets."""
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Sizes)}
    known = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(SMALL if arguments.small else Sizes(), **known)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="random-1b, with --small random-mid, or a folder")
    parser.add_argument("--small", action="store_true", help="a load for two CPU cores")
    parser.add_argument("--before", type=Path, help="also measure the build in this src/ folder")
    parser.add_argument("--peer", action="append", default=[], choices=("mlx-lm",), help="also measure this server")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS))
    parser.add_argument("--peer-rows", type=lambda text: text.split(","), default=["short", "queue", "beside"])
    parser.add_argument("--ours", default="", help="extra options for `millstream serve`")
    parser.add_argument("--before-options", default="", help="the same for the older build, which may not know all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write figures.json and report.md to this folder")
    sizes = parser.add_argument_group("sizes (default: see bench/long_rows.py)")
    kinds: dict[str, Callable[[str], object]] = {"counts": numbers, "settle": float}
    for field in dataclasses.fields(Sizes):
        sizes.add_argument(f"--{field.name.replace('_', '-')}", type=kinds.get(field.name, int))
    arguments = parser.parse_args(words)
    if unknown := {*arguments.rows, *arguments.peer_rows} - set(ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}")
    arguments.servers = [OURS, *([BEFORE] if arguments.before else []), *arguments.peer]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
