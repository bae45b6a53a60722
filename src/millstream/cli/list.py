"""`millstream list`: the models on this machine's disk."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from millstream.cli.cache_options import add_cache_dir
from millstream.cli.parser import examples
from millstream.models.sizes import size_text
from millstream.models.transfer import duration_text

if TYPE_CHECKING:
    from millstream.models.disk_models import DiskModel

COLUMNS = ("NAME", "SIZE", "KIND", "QUANTISATION", "CONTEXT", "LAST USED")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "list",
        aliases=["ls"],
        help="list the models on disk",
        description="List the models on disk: those in the cache of the Hugging Face hub, and the demo model.",
        epilog=examples(("millstream list", "what is on disk"), ("millstream list --json", "for a program")),
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_cache_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    from millstream.models.disk_models import disk_models  # NumPy and the hub's client are slow to import

    models = disk_models(arguments.cache_dir)
    if arguments.json:
        print(json.dumps([_fields(model) for model in models], indent=2))
    elif models:
        _print_table(models)
    else:
        print("No models on disk. Download one: millstream pull mlx-community/Qwen3-4B-4bit, or millstream pull demo")
    return 0


def _print_table(models: list[DiskModel]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in ("SIZE", "CONTEXT") else "left", no_wrap=True)
    for model in models:
        context = f"{model.context_length:,}" if model.context_length else "-"
        kind = model.kind if model.cached.is_complete else "incomplete"
        table.add_row(
            model.cached.name,
            size_text(model.cached.size),
            kind,
            model.quantization or "-",
            context,
            _ago(model.cached.last_used),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=200, no_color=True)
    console.print(table)


def _ago(moment: float | None) -> str:
    return "never" if moment is None else f"{_coarse(max(0.0, time.time() - moment))} ago"


def _coarse(seconds: float) -> str:
    if seconds < 60:
        return "seconds"
    days = int(seconds // 86_400)
    return f"{days} day{'s' if days > 1 else ''}" if days else duration_text(seconds).rsplit(" ", 2)[0]


def _fields(model: DiskModel) -> dict[str, Any]:
    cached = model.cached
    return {
        "name": cached.name,
        "size_bytes": cached.size,
        "kind": model.kind,
        "complete": cached.is_complete,
        "family": model.family,
        "parameters": model.parameters,
        "quantization": model.quantization,
        "context_length": model.context_length,
        "last_used": cached.last_used,
        "commit": cached.commit,
        "path": str(cached.path),
    }
