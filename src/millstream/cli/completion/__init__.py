"""`millstream completion`: print the script with which a shell completes commands, options and model names."""

from __future__ import annotations

import argparse
from importlib import resources

from millstream.cli.parser import examples

SHELLS = ("bash", "zsh", "fish")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script for completion in the shell",
        description="Print a script with which the shell completes commands, options and names of models. Load it in "
        "the shell's start-up file.",
        epilog=examples(
            ("echo 'eval \"$(millstream completion bash)\"' >> ~/.bashrc", "bash"),
            ("echo 'eval \"$(millstream completion zsh)\"' >> ~/.zshrc", "zsh, after compinit"),
            ("millstream completion fish > ~/.config/fish/completions/millstream.fish", "fish"),
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    print(script(arguments.shell), end="")
    return 0


def script(shell: str) -> str:
    return resources.files(__name__).joinpath(f"millstream.{shell}").read_text(encoding="utf-8")
