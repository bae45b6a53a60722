"""`millstream pull`: download a model, so that serving it later needs no network."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from millstream.cli.cache_options import add_cache_dir
from millstream.cli.parser import examples
from millstream.errors import MillstreamError
from millstream.models.sizes import size_text
from millstream.models.source import ModelSource, is_demo, resolve
from millstream.models.transfer import Transfer

LINE_SECONDS = 5.0
"""Without a terminal: seconds between two lines."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model",
        description="Download a model from the Hugging Face hub to its cache: only the files that are needed. A "
        "download that was interrupted continues where it stopped. Private and gated models need a token in HF_TOKEN.",
        epilog=examples(
            ("millstream pull mlx-community/Qwen3-4B-4bit", "a model from the hub"),
            ("millstream pull org/name@revision", "as it was at a revision"),
            ("millstream pull org/name:Q4_K_M", "a GGUF file by its quantisation"),
            ("millstream pull demo", "the demo model"),
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model", metavar="MODEL", help="a hub id: org/name, org/name@revision, org/name:Q4_K_M; or demo"
    )
    add_cache_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    spec: str = arguments.model
    if not is_demo(spec) and Path(spec).expanduser().exists():
        print(
            f"millstream: {spec} is on this machine already: serve it with 'millstream serve {spec}'", file=sys.stderr
        )
        return 1
    signal.signal(signal.SIGTERM, _terminated)  # so that the download is ended in order
    try:
        with _display() as display:
            source = resolve(spec, cache_dir=arguments.cache_dir, report=display.report, progress=display.update)
    except KeyboardInterrupt:
        print(f"millstream: interrupted. {_what_is_left(spec)}", file=sys.stderr)
        return 130
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        return 1
    name = source.name if is_demo(spec) else spec
    print(f"{name} is complete: {size_text(_size(source))} in {source.path}")
    print(f"Serve it with: millstream serve {'' if is_demo(spec) else spec}".rstrip())
    return 0


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _what_is_left(spec: str) -> str:
    if is_demo(spec):
        return "Nothing of the demo model is left."
    return "What was downloaded is kept: the same command continues there."


def _size(source: ModelSource) -> int:
    files = [source.path] if source.kind == "gguf" else [file for file in source.path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


class PlainDisplay:
    """Lines on stderr, every few seconds."""

    def __init__(self) -> None:
        self._transfer = Transfer()
        self._next = 0.0

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is open."""

    def report(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def update(self, done: int, total: int) -> None:
        self._transfer.update(done, total)
        now = time.monotonic()
        if now >= self._next or done == total:
            self._next = now + LINE_SECONDS
            self.report(self._transfer.text)


class BarDisplay:
    """A progress bar in a terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("[progress.percentage]{task.percentage:>3.0f} %"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", total=None, visible=False)

    def __enter__(self) -> BarDisplay:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def report(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total, visible=True)


def _display() -> PlainDisplay | BarDisplay:
    console = Console(stderr=True)
    return BarDisplay(console) if console.is_terminal else PlainDisplay()
