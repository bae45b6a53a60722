"""What may come next on a command line. The scripts of the shells ask for it at each press of the Tab key.

The answer is printed: a line for each candidate, with a tab before its description. `:files` stands for files.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from millstream.cli.parser import Parser
from millstream.cli.served_models import list_models
from millstream.cli.server_client import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE, ServerClient
from millstream.errors import MillstreamError
from millstream.models.nearby import cached_ids

FILES = ":files"
PATIENCE = 0.5
"""Seconds that a server has to say which models it has: someone waits with a finger on the key."""
_ON_DISK = ("serve", "pull", "show", "rm")
"""Commands for models on disk. The others mean models of a server, too."""

Candidate = tuple[str, str]


def print_candidates(parser: Parser, words: Sequence[str]) -> int:
    """`words` follow the name of the program; the last one is being typed, and may be empty."""
    for value, description in candidates(parser, words):
        print(value if value == FILES else f"{value}\t{description}")
    return 0


def candidates(parser: Parser, words: Sequence[str]) -> list[Candidate]:
    *before, current = words or [""]
    commands = _commands(parser)
    command = next((word for word in before if word in commands.choices), None)
    if command is None:
        helps = {action.dest: action.help or "" for action in commands._choices_actions}
        found = [*((name, helps.get(name, "")) for name in commands.choices), *_options(parser)]
        return _starting(found if current.startswith("-") else found[: len(commands.choices)], current)
    return _of_command(commands.choices[command], command, before[before.index(command) + 1 :], current)


def _of_command(parser: argparse.ArgumentParser, command: str, before: list[str], current: str) -> list[Candidate]:
    options = parser._option_string_actions
    name, given, value = current.partition("=")
    if given and name in options:
        return [(f"{name}={found}", told) for found, told in _starting(_values(options[name], command), value)]
    previous = options.get(before[-1]) if before else None
    if previous is not None and previous.nargs is None:
        return _starting(_values(previous, command), current)
    if current.startswith("-"):
        return _starting(_options(parser), current)
    positionals = parser._get_positional_actions()
    if not positionals:
        return []
    count = sum(not word.startswith("-") for word in before)
    return _starting(_values(positionals[min(count, len(positionals) - 1)], command), current)


def _values(action: argparse.Action, command: str) -> Iterable[Candidate]:
    if action.choices is not None:
        return [(str(choice), "") for choice in action.choices]
    if "MODEL" in str(action.metavar or action.dest).upper():
        return [*model_names(command), (FILES, "")]
    return [(FILES, "")] if action.type is Path else []


def model_names(command: str) -> list[Candidate]:
    found = [] if command in _ON_DISK else [(name, "served") for name in _served()]
    served = {name for name, _ in found}
    return [*found, *((name, "on disk") for name in cached_ids() if name not in served)]


def _served() -> list[str]:
    client = ServerClient(os.environ.get(URL_VARIABLE) or DEFAULT_URL, os.environ.get(KEY_VARIABLE))
    try:
        models = list_models(client, PATIENCE)
    except MillstreamError:
        return []
    return [name for model in models for name in (model.name, *model.aliases)]


def _options(parser: argparse.ArgumentParser) -> list[Candidate]:
    """The long name of each option, with its help."""
    named = [(action.option_strings, action.help or "") for action in parser._actions if action.option_strings]
    return [(names[-1], help) for names, help in named if help != argparse.SUPPRESS]


def _starting(found: Iterable[Candidate], current: str) -> list[Candidate]:
    return [(value, told) for value, told in found if value == FILES or value.startswith(current)]


def _commands(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
