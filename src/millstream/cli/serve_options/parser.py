"""The argument parser of `millstream serve`, made from the table of options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream.cli.serve_options import GROUPS, OPTIONS
from millstream.cli.serve_options.option import Option

DESCRIPTION = """\
Serve models over OpenAI's, Anthropic's and Ollama's APIs.
Without a model, this serves the demo model, SmolLM2-135M-Instruct.
"""
USAGE = "millstream serve [MODEL ...] [OPTIONS]"
EXAMPLES = """\
examples:
  millstream serve
      the demo model, at http://127.0.0.1:8000
  millstream serve mlx-community/Qwen3-4B-4bit --memory 16GB
      a model from the hub
  millstream serve --config mill.toml --show-config
      what would be in force, and where it is set
"""
PLACES = """\
Every option can be set in three places. A flag wins over the environment, the
environment wins over the config file, and the config file wins over the default.
For --max-batch 8, set MILLSTREAM_MAX_BATCH=8 in the environment, or write
max_batch = 8 below [server] in the config file.

"""


def fill_parser(parser: argparse.ArgumentParser) -> None:
    """Add all arguments. `parser` was made with `add_help=False`: the help here has a short and a long form."""
    parser.usage = USAGE
    parser.description = DESCRIPTION
    parser.epilog = PLACES + EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_arguments(parser, essential_only=False)


class _ShortHelp(argparse.Action):
    """Shows what most people need."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        short = argparse.ArgumentParser(
            usage=USAGE,
            description=DESCRIPTION,
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
        )
        _add_arguments(short, essential_only=True)
        short.print_help()
        parser.exit()


class _LongHelp(_ShortHelp):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.print_help()
        parser.exit()


def _add_arguments(parser: argparse.ArgumentParser, *, essential_only: bool) -> None:
    models = parser.add_argument_group("models")
    models.add_argument(
        "models", nargs="*", default=[], metavar="MODEL", help="a folder, a .gguf file or a hub id (org/name)"
    )
    for group in GROUPS:
        if group.essential or not essential_only:
            section = parser.add_argument_group(group.title)
            for option in group.options:
                if "flag" in option.places:
                    _add_option(section, option)
        if group is _last_essential():
            _add_configuration(parser.add_argument_group("configuration"))
    rest = parser.add_argument_group("help")
    rest.add_argument("-h", "--help", action=_ShortHelp, help="show what most people need")
    rest.add_argument("--help-all", action=_LongHelp, help=f"show all {len(OPTIONS)} options, by topic")


def _last_essential() -> object:
    return [group for group in GROUPS if group.essential][-1]


def _add_configuration(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config",
        type=Path,
        default=None,
        metavar="FILE",
        help="TOML file with models and options (default: MILLSTREAM_CONFIG, else millstream/config.toml in your "
        "config folder, if it exists). SIGHUP reads its models again",
    )
    group.add_argument("--no-config", action="store_true", default=False, help="read no config file")
    group.add_argument(
        "--show-config",
        action="store_true",
        default=False,
        help="print every option in force and where it is set, then exit; secrets are hidden",
    )
    group.add_argument("--json", action="store_true", default=False, help="with --show-config: print JSON")


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    value = option.value
    text = option.full_help.replace("%", "%%")
    if value.is_switch:
        group.add_argument(
            option.flag, action=argparse.BooleanOptionalAction, dest=option.name, default=argparse.SUPPRESS, help=text
        )
        return
    metavar = value.metavar or (None if value.choices is None else "{" + ",".join(map(str, value.choices)) + "}")
    group.add_argument(
        option.flag,
        action="append" if value.is_list else "store",
        type=value.text,
        dest=option.name,
        default=argparse.SUPPRESS,
        choices=value.choices,
        metavar=metavar,
        help=text,
    )
