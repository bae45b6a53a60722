"""`millstream chat`: talk to a model in the terminal, or ask one question."""

from __future__ import annotations

import argparse
from pathlib import Path

from millstream.cli.chat.settings import add_setting_options
from millstream.cli.parser import examples
from millstream.cli.server_client import add_server_options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        aliases=["run"],
        help="talk to a model in the terminal, or ask one question",
        description="Talk to a model in the terminal. A running server is used if there is one; if not, a private one "
        "is started for as long as you talk. With a question or a pipe, only the answer is printed.",
        usage="millstream chat [MODEL] [QUESTION] [options]",
        epilog=examples(
            ("millstream chat", "talk to the running server's model, or to the demo model"),
            ("millstream chat mlx-community/Qwen3-4B-4bit", "talk to a model from the hub"),
            ("millstream chat MODEL 'Why is the sky blue?'", "ask one question"),
            ("cat notes.txt | millstream chat 'Summarise this.'", "ask about a text"),
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument("words", nargs="*", metavar="MODEL QUESTION", help="both may be left out; see the examples")
    parser.add_argument("-m", "--model", help="the model, if all other words are the question")
    talk = parser.add_argument_group("conversation")
    talk.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    talk.add_argument(
        "--image",
        metavar="PATH",
        type=Path,
        action="append",
        default=[],
        help="image for the first question; may be repeated",
    )
    add_setting_options(parser.add_argument_group("sampling"))
    add_server_options(parser.add_argument_group("server"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the whole response as JSON; needs a question")
    output.add_argument("--verbose", action="store_true", help="also show tokens and speed")


def run(arguments: argparse.Namespace) -> int:
    from millstream.cli.chat.command import run  # half a second, which `--help` and completion do without

    return run(arguments)
