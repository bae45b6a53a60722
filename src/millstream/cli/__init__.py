"""The command line: one module per command, imported only when it is used."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from millstream import __version__
from millstream.cli.parser import Parser, examples
from millstream.errors import MillstreamError

COMMANDS = {
    "serve": "serve",
    "chat": "chat",
    "run": "chat",
    "ps": "ps",
    "pull": "pull",
    "list": "list",
    "ls": "list",
    "show": "show",
    "rm": "rm",
    "say": "say",
    "transcribe": "transcribe",
    "bench": "bench",
    "launch": "launch",
    "doctor": "doctor",
    "completion": "completion",
}
"""Each command, or its other name, with its module in this package. A module has `add_parser(commands)`, which adds
the command with its description and examples and sets `run`: a function of the arguments that returns the exit code."""

INTERRUPTED = 130
"""The exit code of a shell for a program that Ctrl-C ended."""

WELCOME = f"""\
Millstream {__version__}: an inference server for MLX.

First commands to try:
  millstream chat            talk to the demo model, here in the terminal
  millstream serve           serve the demo model at http://127.0.0.1:8000
  millstream serve MODEL     serve a folder, a .gguf file or a hub id (org/name)
  millstream ps              see what a running server has loaded
  millstream doctor          check this machine and the installation

All commands: millstream --help"""


def main(argv: Sequence[str] | None = None) -> int:
    given = tuple(sys.argv[1:] if argv is None else argv)  # a command's module may be called `list`
    if not given:
        print(WELCOME)
        return 0
    if given[0] == "--version":  # works even if no command can be imported
        from millstream.cli.versions import version_line

        print(version_line())
        return 0
    if given[0] == "__complete":  # the scripts of `completion` call it
        from millstream.cli.completion.candidates import print_candidates

        return print_candidates(make_parser(next((word for word in given[1:-1] if word in COMMANDS), None)), given[1:])
    if given[0] == "serve":
        # Until the server runs, which takes seconds of imports. Then nothing has begun that would have to end.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        own, of_agent = _split_arguments(given)
        parser = make_parser(own[0] if own[0] in COMMANDS else None)
        arguments = parser.parse_args(own, argparse.Namespace(agent_arguments=of_agent))
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except MillstreamError as error:
        return _fail(error.message)
    except ModuleNotFoundError as error:
        return _fail(f"This installation is incomplete ({error}). 'millstream doctor' says how to repair it.")
    except KeyboardInterrupt:
        print("millstream: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def make_parser(only: str | None = None) -> Parser:
    """The parser of all commands, or one that knows a single command: the modules of the others are not imported."""
    parser = Parser(
        prog="millstream",
        description="An inference server for MLX: serve models over OpenAI's, Anthropic's and Ollama's APIs, and talk "
        "to them.",
        epilog=examples(
            ("millstream chat", "talk to the demo model"),
            ("millstream serve MODEL", "serve a folder, a .gguf file or a hub id"),
            ("millstream COMMAND --help", "what a command does and which options it has"),
        ),
    )
    parser.add_argument("--version", action="store_true", help="show the versions of Millstream and MLX, and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for module in dict.fromkeys(COMMANDS.values()) if only is None else [COMMANDS[only]]:
        importlib.import_module(f"millstream.cli.{module}").add_parser(commands)
    return parser


def _split_arguments(given: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our arguments and, of a launch, those after `--`, which are the agent's."""
    if given[0] != "launch" or "--" not in given:
        return given, []
    place = given.index("--")
    return given[:place], given[place + 1 :]


def _fail(message: str) -> int:
    print(f"millstream: {message}", file=sys.stderr)
    return 1
