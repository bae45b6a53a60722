"""What the longest steps of an engine were made of, beside the gaps that a client saw: where a gap p99 comes from.

    python bench/step_times.py beside --model random-1b --ours "--isolation process --speculation off"
    python bench/step_times.py streams --model lfm2-1b --streams 64 --requests 2

`beside`: 4 streams decode, and long prompts come one at a time (see bench/long_contexts.py). `streams`: so many at
once, some rounds, of which the last is shown. Times are in milliseconds. To note them costs a few microseconds each.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import long_rows
import servers
from millstream.bench.load import Load
from millstream.bench.report import percentile
from millstream.cli.bench import measure
from models import find
from prompts import Prompts
from targets import Target

STEP, TURN = "MlxGenerationBackend.step", "OwnerLoop._step"
TRACE = Path(__file__).parent / "step_trace"


class Noted(NamedTuple):
    name: str
    began: float
    ended: float

    @property
    def took(self) -> float:
        return self.ended - self.began


def read_notes(file: Path) -> list[Noted]:
    """Of all processes, by their begin."""
    found = [Noted(*each) for path in file.parent.glob(f"{file.name}.*.json") for each in json.loads(path.read_text())]
    return sorted(found, key=lambda each: each.began)


def longest(notes: Sequence[Noted], since: float, until: float, count: int) -> list[Noted]:
    """The longest steps between two times, in their order."""
    steps = [each for each in notes if each.name == STEP and since < each.began < until]
    return sorted(sorted(steps, key=lambda each: -each.took)[:count], key=lambda each: each.began)


def parts_of(step: Noted, notes: Iterable[Noted], least: float) -> list[Noted]:
    """What went on in a step, its planning, and beside it in the server's process, for at least so many seconds."""
    notes = list(notes)
    turns = [each for each in notes if each.name == TURN and each.began <= step.began and each.ended >= step.ended]
    since, until = (turns[-1].began, turns[-1].ended) if turns else (step.began, step.ended)
    return [each for each in notes if each.began < until and each.ended > since and each.took >= least]


def report(notes: Sequence[Noted], since: float, until: float, *, count: int, least: float) -> str:
    times = [each.took for each in notes if each.name == STEP and since < each.began < until]
    if not times:
        return "no step was noted"
    lines = [f"{len(times)} steps, median {percentile(times, 0.5):.2f}, p99 {percentile(times, 0.99):.2f}"]
    for step in longest(notes, since, until, count):
        lines.append(f"\nafter {(step.began - since) * 1000:.1f}: {step.took * 1000:.2f}")
        for part in parts_of(step, notes, least):
            lines.append(f"  {(part.began - step.began) * 1000:8.2f} {part.took * 1000:8.2f}  {part.name}")
    return "\n".join(lines)


def run_streams(url: str, arguments: argparse.Namespace) -> float:
    """Returns when the last round began."""
    load = Load(
        url=url,
        model="",
        prompt_words=15,
        output_tokens=arguments.output_tokens,
        requests_per_stream=arguments.requests,
        temperature=0.0,
        ignore_eos=True,
    )
    began = 0.0
    for number in range(arguments.rounds):
        began = time.monotonic()
        (seen,) = asyncio.run(measure(load, (arguments.streams,), warmup=number == 0))
        load = dataclasses.replace(load, seed=number + 1)  # a prefix cache must not know the next prompts
        print(f"{seen.tokens_per_second:,.0f} tokens/s, gap p50 {seen.gap_p50:.2f}, p99 {seen.gap_p99:.2f}", flush=True)
    return began


def run_beside(url: str, folder: Path, arguments: argparse.Namespace) -> float:
    """Returns when it began."""
    target = Target("millstream", urlsplit(url), "", Prompts(folder, as_text=False, seed=0))
    sizes = long_rows.Sizes(
        prompt=arguments.prompt, beside_prompts=arguments.prompts, join_output=arguments.output_tokens
    )
    asyncio.run(long_rows.warm_up(target, sizes))
    began = time.monotonic()
    print(json.dumps(asyncio.run(long_rows.beside(target, sizes))), flush=True)
    return began


def main() -> int:
    arguments = parse()
    folder = find(arguments.model)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "notes"
        paths = [str(TRACE), str(Path(__file__).parent.parent / "src"), *filter(None, sys.path)]
        environment = {"MLX_STEP_TRACE": str(file), "PYTHONPATH": ":".join(paths)}
        options = tuple(arguments.ours.split())
        with servers.running("millstream", folder, options, environment=environment) as url:
            beside = arguments.load == "beside"
            began = run_beside(url, folder, arguments) if beside else run_streams(url, arguments)
            ended = time.monotonic()
        print(report(read_notes(file), began, ended, count=arguments.steps, least=arguments.least / 1000))
    return 0


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", choices=("beside", "streams"))
    parser.add_argument("--model", default="random-1b", help="a name of bench/models.py, or a folder")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="per stream")
    parser.add_argument("--rounds", type=int, default=3, help="of streams; with 1, what a server's first ones see")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of a long prompt")
    parser.add_argument("--prompts", type=int, default=8, help="how many of them")
    parser.add_argument("--output-tokens", type=int, help="default: 128, or 20,000 beside long prompts")
    parser.add_argument("--steps", type=int, default=12, help="how many of the longest steps are shown")
    parser.add_argument("--least", type=float, default=0.2, help="leave out parts that took less, in milliseconds")
    parser.add_argument("--ours", default="--isolation process --speculation off", help="options of `millstream serve`")
    arguments = parser.parse_args(words)
    if arguments.output_tokens is None:
        arguments.output_tokens = 20_000 if arguments.load == "beside" else 128
    return arguments


if __name__ == "__main__":
    sys.exit(main())
