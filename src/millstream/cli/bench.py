"""`millstream bench`: measure any OpenAI-compatible server under load."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millstream.bench.load import Load, run
from millstream.bench.plot import save_plot
from millstream.bench.report import Figures, figures, save_json, table
from millstream.cli.arguments import natural, positive
from millstream.errors import MillstreamError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a server under load",
        description="Send concurrent streams to an OpenAI-compatible server and print throughput and latency.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=run_command)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="URL of the server")
    parser.add_argument("--model", default="", help="model to request; empty: the server's default")
    parser.add_argument("--api", choices=("chat", "completions"), default="chat", help="endpoint to use")
    parser.add_argument("--levels", type=_levels, default=(1, 4, 16), help="numbers of concurrent streams, e.g. 1,4,16")
    parser.add_argument("--requests", type=positive, default=2, help="requests per stream")
    parser.add_argument("--prompt-words", type=positive, default=100, help="words per prompt")
    parser.add_argument("--shared-words", type=natural, default=0, help="words in the prefix that all prompts share")
    parser.add_argument("--output-tokens", type=positive, default=128, help="max_tokens of each request")
    parser.add_argument("--rate", type=float, default=None, help="requests per second, as a Poisson process")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling")
    parser.add_argument("--seed", type=natural, default=0, help="seed of the random prompts")
    parser.add_argument("--ignore-eos", action="store_true", help="generate max_tokens tokens per request")
    parser.add_argument("--no-warmup", action="store_true", help="do not send unmeasured requests first")
    parser.add_argument("--title", default="", help="title of the table")
    parser.add_argument("--json", type=Path, default=None, help="write the results to this file")
    parser.add_argument("--plot", type=Path, default=None, help="write a plot (PNG) to this file")


def run_command(arguments: argparse.Namespace) -> int:
    load = Load(
        url=arguments.url,
        model=arguments.model,
        api=arguments.api,
        prompt_words=arguments.prompt_words,
        shared_words=arguments.shared_words,
        output_tokens=arguments.output_tokens,
        requests_per_stream=arguments.requests,
        rate=arguments.rate,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        ignore_eos=arguments.ignore_eos,
    )
    title = arguments.title or arguments.url
    levels = asyncio.run(measure(load, arguments.levels, warmup=not arguments.no_warmup))
    Console(width=110).print(table(title, levels))
    for level in levels:
        if level.first_error is not None:
            print(f"{level.errors} errors at {level.streams} streams, first: {level.first_error}", file=sys.stderr)
    try:
        if arguments.json is not None:
            save_json(arguments.json, title, levels)
        if arguments.plot is not None:
            save_plot(arguments.plot, {title: levels})
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        return 1
    return 1 if any(level.errors for level in levels) else 0


async def measure(load: Load, levels: tuple[int, ...], *, warmup: bool) -> list[Figures]:
    """Measure each level in turn, each with prompts of its own. Warm-up requests are not counted."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    measured = []
    number = 10_000_000
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for streams in levels:
            if warmup:
                short = dataclasses.replace(load, requests_per_stream=1, output_tokens=min(8, load.output_tokens))
                task = progress.add_task(f"{streams} streams, warm-up", total=streams)
                await run(short, streams, lambda task=task: progress.advance(task), first_number=number)  # type: ignore[misc]
                number += streams
            task = progress.add_task(f"{streams} streams", total=streams * load.requests_per_stream)
            result = await run(load, streams, lambda task=task: progress.advance(task), first_number=number)  # type: ignore[misc]
            number += streams * load.requests_per_stream
            measured.append(figures(result))
    return measured


def _levels(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))
