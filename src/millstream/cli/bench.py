"""`millstream bench`: measure any OpenAI-compatible server under load."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millstream.bench.load import Load
from millstream.bench.plot import save_plot
from millstream.bench.processes import processes_for, run_split
from millstream.bench.report import Figures, figures, save_json, table
from millstream.cli.arguments import duration, natural, positive
from millstream.cli.bench_report import LEVELS, write_report
from millstream.cli.parser import DefaultsHelpFormatter, examples
from millstream.cli.server_client import DEFAULT_URL, NoServer, ServerClient
from millstream.errors import MillstreamError

_NO_SERVER = "Start one with 'millstream serve MODEL', or give its URL: millstream bench URL"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a server under load",
        description="Send concurrent streams to an OpenAI-compatible server and print throughput and latency.",
        epilog=examples(
            ("millstream bench", "1, 4 and 16 streams at the server of this machine"),
            ("millstream bench --levels 1,8,32 --output-tokens 256", "other loads"),
            ("millstream bench http://host:8000 --json result.json --plot result.png", "keep the figures"),
            ("millstream bench --report report.md", "all figures and versions in one file, for an issue"),
            ("millstream bench --report report.md --serve MODEL --kv-bits 0,8", "the same of servers started for it"),
        ),
        formatter_class=DefaultsHelpFormatter,
    )
    parser.set_defaults(run=run_command)
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="URL of the server")
    requests = parser.add_argument_group("requests")
    requests.add_argument("--model", default="", help="model to request; without it: the server's default")
    requests.add_argument("--api", choices=("chat", "completions"), default="chat", help="endpoint to use")
    requests.add_argument("--prompt-words", metavar="N", type=positive, default=100, help="words per prompt")
    requests.add_argument(
        "--shared-words", metavar="N", type=natural, default=0, help="words in the prefix that all prompts share"
    )
    requests.add_argument("--output-tokens", metavar="N", type=positive, default=128, help="max_tokens of each request")
    requests.add_argument("--temperature", metavar="X", type=float, default=0.0, help="sampling temperature")
    requests.add_argument("--top-p", metavar="X", type=float, default=1.0, help="nucleus sampling")
    requests.add_argument("--seed", metavar="N", type=natural, default=0, help="seed of the random prompts")
    requests.add_argument("--ignore-eos", action="store_true", help="generate max_tokens tokens per request")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--levels",
        metavar="N,N",
        type=_levels,
        help="numbers of concurrent streams; default: 1,4,16, for --report 1,8,32,64",
    )
    load.add_argument("--requests", metavar="N", type=positive, default=2, help="requests per stream")
    load.add_argument("--seconds", metavar="X", type=duration, help="stop a level after so long; what arrived counts")
    load.add_argument("--rate", metavar="X", type=float, help="requests per second, as a Poisson process")
    load.add_argument(
        "--processes", metavar="N", type=natural, default=0, help="processes that send; 0: by streams and cores"
    )
    load.add_argument("--no-warmup", action="store_true", help="do not send unmeasured requests first")
    output = parser.add_argument_group("output")
    output.add_argument("--title", default="", help="title of the table")
    output.add_argument("--json", metavar="FILE", type=Path, help="write the results to this file")
    output.add_argument("--plot", metavar="FILE", type=Path, help="write a plot (PNG) to this file")
    report = parser.add_argument_group("report")
    report.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="write device, versions, fast paths and more figures to this Markdown file, without paths and names",
    )
    report.add_argument("--serve", metavar="MODEL", help="start a server for the report instead of using a running one")
    report.add_argument(
        "--kv-bits", metavar="N,N", type=_kv_bits, default=(), help="with --serve: measure each of 0, 8 and 4"
    )


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
        seconds=arguments.seconds,
    )
    if arguments.report is not None:
        return _report(load, arguments)
    if arguments.serve is not None or arguments.kv_bits:
        raise MillstreamError("--serve and --kv-bits are for --report FILE")
    require_server(load)
    title = arguments.title or arguments.url
    chosen = arguments.levels or (1, 4, 16)
    measured = measure(load, chosen, warmup=not arguments.no_warmup, processes=arguments.processes)
    levels = asyncio.run(measured)
    Console(width=110).print(table(title, levels))
    for level in levels:
        if level.first_error is not None:
            print(f"{level.errors} errors at {level.streams} streams, first: {level.first_error}", file=sys.stderr)
        if level.cut:
            print(f"{level.cut} requests at {level.streams} streams were stopped: their time was up", file=sys.stderr)
    try:
        if arguments.json is not None:
            save_json(arguments.json, title, levels)
        if arguments.plot is not None:
            save_plot(arguments.plot, {title: levels})
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        return 1
    return 1 if any(level.errors for level in levels) else 0


def _report(load: Load, arguments: argparse.Namespace) -> int:
    if arguments.serve is None:
        if arguments.kv_bits:
            raise MillstreamError("--kv-bits needs --serve MODEL: a running server has chosen already")
        require_server(load)
    levels = arguments.levels or LEVELS
    write_report(arguments.report, load, levels, serve=arguments.serve, kv_bits=arguments.kv_bits)
    print(f"The report is in {arguments.report}. It names no paths, hosts or keys, but look before you attach it.")
    return 0


def require_server(load: Load) -> None:
    """Raises `NoServer` if nothing listens there. Any other answer is fine: not every server lists its models."""
    client = ServerClient(f"{load.target.scheme}://{load.target.netloc}", advice=_NO_SERVER)
    try:
        client.get("/v1/models")
    except NoServer:
        raise
    except MillstreamError:
        return


async def measure(load: Load, levels: tuple[int, ...], *, warmup: bool, processes: int = 0) -> list[Figures]:
    """Measure each level in turn, each with prompts of its own. Warm-up requests are not counted. `processes`: that
    send the requests; 0 for as many as the streams and this machine suggest."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    measured = []
    number = 10_000_000
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for streams in levels:
            workers = processes or processes_for(streams)
            if warmup:
                short = dataclasses.replace(load, requests_per_stream=1, output_tokens=min(8, load.output_tokens))
                task = progress.add_task(f"{streams} streams, warm-up", total=streams)
                advance = functools.partial(progress.advance, task)
                await run_split(short, streams, advance, processes=workers, first_number=number)
                number += streams
            task = progress.add_task(f"{streams} streams", total=streams * load.requests_per_stream)
            advance = functools.partial(progress.advance, task)
            result = await run_split(load, streams, advance, processes=workers, first_number=number)
            number += streams * load.requests_per_stream
            measured.append(figures(result))
    return measured


def _levels(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def _kv_bits(text: str) -> tuple[int, ...]:
    bits = tuple(natural(part) for part in text.split(","))
    if set(bits) - {0, 4, 8}:
        raise argparse.ArgumentTypeError(f"{text!r}: the KV cache has 8 or 4 bits, or 0 for those of the model")
    return bits
