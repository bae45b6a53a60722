"""Every family of models against mlx-lm's server: the same random weights, machine and load.

    python bench/families.py --out report/                                             (a GPU)
    python bench/families.py --families random-tiny --levels 1,4 --output-tokens 16    (two CPU cores)

For each family: tokens/s, first token and gaps at each number of streams, and the ratio to the peer in the same run.
A server has the device to itself: the peer starts when ours has stopped. Even an idle one takes memory, and on an H200
a third of the speed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import servers
from millstream.bench.load import Load
from millstream.bench.report import Figures
from millstream.cli.bench import measure
from models import find

DEFAULT = ("random-1b", "llama-8b", "llama-8b@4", "qwen3-4b", "qwen3-moe", "gemma3-1b", "lfm2-1b")
OURS, PEER = "millstream", "mlx-lm"
PEER_LEVELS = (1, 32)
HEADINGS = ("streams", "tokens/s", PEER, "ratio", "first p50, ms", "gap p50, ms", "gap p99, ms", "p99 / p50")

Found = dict[str, dict[str, list[Figures]]]
"""Figures by family and server."""


def main() -> int:
    arguments = parse()
    found: Found = {}
    folders = {family: find(family) for family in arguments.families}
    for family in arguments.families:
        found[family] = {}
        levels_of = {OURS: arguments.levels, PEER: peer_levels(arguments, family)}
        for server in (OURS, PEER):
            if levels_of[server]:
                try:
                    found[family][server] = serve_and_run(server, family, folders[family], levels_of[server], arguments)
                except servers.NotStarted as error:
                    say(f"{server} with {family} is left out: {error}")
            if server == OURS and levels_of[PEER]:
                say(report(family, found[family]))  # a slow peer may be stopped: these figures are not lost then
        print(report(family, found[family]), flush=True)
    if arguments.out is not None:
        write(arguments.out, found)
    return 0 if all(OURS in servers_of for servers_of in found.values()) else 1


def serve_and_run(
    server: str, family: str, folder: Path, levels: tuple[int, ...], arguments: argparse.Namespace
) -> list[Figures]:
    """Start a server, measure it and stop it."""
    ours = server == OURS
    with servers.running(server, folder, tuple(arguments.ours.split()) if ours else ()) as url:
        if ours:
            say(f"{family}: {paths(url)}")
        return run(url, "" if ours else str(folder), levels, arguments)


def peer_levels(arguments: argparse.Namespace, family: str) -> tuple[int, ...]:
    """Of a family: those that it was given by its name, or else those for all."""
    if family not in arguments.peer_families:
        return ()
    by_family: dict[str, tuple[int, ...]] = arguments.peer_levels
    return by_family.get(family, by_family[""])


def run(url: str, model: str, levels: tuple[int, ...], arguments: argparse.Namespace) -> list[Figures]:
    load = Load(
        url=url,
        model=model,
        prompt_words=arguments.prompt_words,
        shared_words=arguments.shared_words,
        output_tokens=arguments.output_tokens,
        requests_per_stream=arguments.requests,
        temperature=arguments.temperature,
        ignore_eos=not model,
        seconds=arguments.seconds,
    )
    found: list[Figures] = []
    for streams in levels:
        # Other prompts at each level: a prefix cache must not know them.
        (level,) = asyncio.run(measure(dataclasses.replace(load, seed=streams), (streams,), warmup=True))
        say(f"{streams} streams: {level.tokens_per_second:,.0f} tokens/s")  # not lost if a later level takes too long
        if level.first_error is not None:
            say(f"{level.errors} errors at {streams} streams: {level.first_error}")
        if level.cut:
            say(f"{level.cut} of {level.requests} requests were stopped after {arguments.seconds:g} s")
        found.append(level)
    return found


def paths(url: str) -> str:
    """What the server says of its model: memory, and which fast paths it took."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
        model = json.load(reply)["data"][0]
    return json.dumps({key: model[key] for key in ("weight_bytes", "notes") if key in model})


def report(family: str, figures: dict[str, list[Figures]]) -> str:
    """A Markdown table."""
    lines = [f"\n{family}\n", f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    peers = {level.streams: level for level in figures.get(PEER, ())}
    for level in figures.get(OURS, ()):
        peer = peers.get(level.streams)
        gap, late = level.gap_p50, level.gap_p99
        cells = [
            f"{level.streams}",
            f"{level.tokens_per_second:,.0f}",
            f"{peer.tokens_per_second:,.0f}" if peer else "",
            f"{level.tokens_per_second / peer.tokens_per_second:.1f}" if peer and peer.tokens_per_second else "",
            *(f"{value:.1f}" if value is not None else "" for value in (level.first_p50, gap, late)),
            f"{late / gap:.1f}" if gap and late else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(out: Path, found: Found) -> None:
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        family: {server: [dataclasses.asdict(level) for level in levels] for server, levels in each.items()}
        for family, each in found.items()
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=2))
    (out / "report.md").write_text("\n".join(report(family, each) for family, each in found.items()))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def named_numbers(text: str) -> tuple[str, tuple[int, ...]]:
    """ "1,32" is for all families, "llama-8b=1" for one of them, "lfm2-1b=" for none of its levels."""
    family, equals, levels = text.rpartition("=")
    return family if equals else "", numbers(levels)


def names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=names, default=DEFAULT, help="names of bench/models.py, or folders")
    parser.add_argument("--peer-families", type=names, default=None, help="those that the peer serves too; else all")
    parser.add_argument("--levels", type=numbers, default=(1, 32, 64), help="numbers of streams")
    parser.add_argument(
        "--peer-levels",
        type=named_numbers,
        nargs="+",
        default=[],
        metavar="[FAMILY=]LEVELS",
        help="the same for the peer, for all families (1,32 by default) or for one; empty: no peer",
    )
    parser.add_argument("--requests", type=int, default=2, help="requests per stream")
    parser.add_argument("--seconds", type=float, help="stop a level after so long; what arrived counts")
    parser.add_argument("--prompt-words", type=int, default=15)
    parser.add_argument("--shared-words", type=int, default=0, help="words that all prompts of a level begin with")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ours", default="--isolation process", help="extra options for `millstream serve`")
    parser.add_argument("--out", type=Path, help="write figures.json and report.md to this folder")
    arguments = parser.parse_args(given)
    arguments.peer_levels = {"": PEER_LEVELS, **dict(arguments.peer_levels)}
    if arguments.peer_families is None:
        arguments.peer_families = arguments.families
    return arguments


if __name__ == "__main__":
    sys.exit(main())
