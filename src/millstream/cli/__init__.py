"""The command line: one module per command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from millstream import __version__
from millstream.cli import bench, launch, list, pull, rm, serve, show

INTERRUPTED = 130
"""The exit code of a shell for a program that Ctrl-C ended."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="millstream", description="An inference server for MLX.")
    parser.add_argument("--version", action="version", version=f"millstream {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_parser(commands)
    bench.add_parser(commands)
    launch.add_parser(commands)
    for command in (pull, list, show, rm):
        command.add_parser(commands)
    own, of_agent = launch.split_arguments(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(own, argparse.Namespace(agent_arguments=of_agent))
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("millstream: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code
