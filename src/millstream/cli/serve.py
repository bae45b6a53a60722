"""`millstream serve`: run the server until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from millstream.cli.serve_options import add_options
from millstream.cli.settings import settings_of
from millstream.errors import MillstreamError
from millstream.installed import require_mlx


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve models over HTTP",
        description="Serve models over OpenAI's, Anthropic's and Ollama's APIs. Without a model: the demo model, "
        "SmolLM2-135M-Instruct.",
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "models", nargs="*", default=[], metavar="MODEL", help="a folder, a .gguf file or a hub id (org/name)"
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=None,
        metavar="FILE",
        help="TOML file with models and options; options on the command line override it",
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    for name in ("httpx", "httpx2", "mcp"):  # they log each request, with its URL
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        settings = settings_of(arguments)
        require_mlx()
        from millstream.server import serve  # two seconds, which other commands and wrong options do without

        code, clean = serve(settings)
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        return 1
    if not clean:
        # A thread still hangs in native code or in a download: joining it at exit would hang too.
        logging.shutdown()
        os._exit(code)
    return code
