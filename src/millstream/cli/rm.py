"""`millstream rm`: remove models from the disk."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.cli.cache_options import add_cache_dir
from millstream.cli.parser import examples
from millstream.cli.served_models import served_models
from millstream.cli.server_client import DEFAULT_URL
from millstream.errors import MillstreamError, NotFound, Unauthorized
from millstream.models.demo import DEMO
from millstream.models.nearby import did_you_mean
from millstream.models.sizes import size_text
from millstream.models.source import is_demo

if TYPE_CHECKING:
    from millstream.models.cached_models import CachedModel

UNUSED = ("failed", "stopped")
"""States of a served model whose files the server does not need."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "rm",
        help="remove models from disk",
        description="Remove downloaded models from the disk, after a question. A model that a running server uses is "
        "not removed.",
        epilog=examples(("millstream rm org/name", "asks first"), ("millstream rm org/name --yes", "does not ask")),
    )
    parser.set_defaults(run=run)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name as in 'millstream list'")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument(
        "--url",
        default=os.environ.get("MILLSTREAM_URL") or DEFAULT_URL,
        help=f"URL of the server to look at; default: MILLSTREAM_URL, or {DEFAULT_URL}",
    )
    add_cache_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    from millstream.models.cached_models import cached_models, remove  # the hub's client is slow to import

    try:
        here = cached_models(arguments.cache_dir)
        models = list({model.path: model for name in arguments.models for model in find(name, here)}.values())
        used = _names_in_use(arguments.url.rstrip("/"))
        for model in models:
            if busy := names_of(model) & used:
                raise MillstreamError(
                    f"The server at {arguments.url} uses {busy.pop()}. Stop it first, or remove the model from it."
                )
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        return 1
    for model in models:
        print(f"{model.name}: {size_text(model.size)} in {model.path}")
    freed = size_text(sum(model.size for model in models))
    if not arguments.yes and not _confirmed(f"Remove {'it' if len(models) == 1 else 'them'} and free {freed}?"):
        print("Nothing was removed.")
        return 1
    try:
        remove(models, arguments.cache_dir)
    except OSError as error:
        print(f"millstream: cannot remove {error.filename or 'it'}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"Removed; {freed} freed.")
    return 0


def find(name: str, models: list[CachedModel]) -> list[CachedModel]:
    """The model of this name, or all of the repository of this name. Raises `NotFound`."""
    wanted = DEMO.name if is_demo(name) else name.removeprefix("https://").removeprefix("hf.co/")
    exact = [model for model in models if model.name == wanted]
    of_repo = [model for model in models if model.repo == wanted]
    of_file = [model for model in models if model.repo and wanted == f"{model.repo}/{model.path.name}"]
    if found := of_repo or exact or of_file:
        return found
    if Path(name).expanduser().exists():
        raise NotFound(f"{name} is not a downloaded model: 'rm' removes only what 'millstream list' shows.")
    hint = did_you_mean(name, (model.name for model in models))
    raise NotFound(f"{name} is not on this machine.{hint} 'millstream list' shows what is.")


def names_of(model: CachedModel) -> set[str]:
    """The names that a server gives it by default."""
    plain = model.name.split("@")[0]
    return {plain, *([model.repo] if model.repo else []), model.path.stem}


def _names_in_use(url: str) -> set[str]:
    """A look, not a lock. Empty if no server answers."""
    try:
        models = served_models(url, os.environ.get("MILLSTREAM_API_KEY"))
    except Unauthorized:
        print(
            f"millstream: the server at {url} asks for a key: set MILLSTREAM_API_KEY to see what it uses",
            file=sys.stderr,
        )
        return set()
    except MillstreamError:
        return set()
    return {name for model in models if model.state not in UNUSED for name in (model.name, *model.aliases)}


def _confirmed(question: str) -> bool:
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
