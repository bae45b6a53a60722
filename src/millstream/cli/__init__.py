"""The command line: one module per command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from millstream import __version__
from millstream.cli import bench, serve


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="millstream", description="An inference server for MLX.")
    parser.add_argument("--version", action="version", version=f"millstream {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_parser(commands)
    bench.add_parser(commands)
    arguments = parser.parse_args(argv)
    run = arguments.run
    code: int = run(arguments)
    return code
