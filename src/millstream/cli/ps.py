"""`millstream ps`: what a running server has loaded, once or live."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from typing import Any, NoReturn

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.cli.parser import examples
from millstream.cli.served_models import fetch_models
from millstream.cli.server_client import DEFAULT_URL, ServerClient, add_server_options

INTERVAL = 1.0
HEADINGS = ("NAME", "STATE", "KIND", "MEMORY", "ROWS", "QUEUE", "DRAFTS", "UNTIL")
_STYLES = {"ready": "green", "failed": "red", "stopped": "red", "unloaded": "dim"}
_KINDS = {
    "vision": "images",
    "audio": "audio",
    "embedding": "embedding",
    "speech": "speech",
    "transcription": "transcription",
    "tools": "tools",
    "thinking": "reasoning",
}
_FOREVER = 100 * 365 * 86400


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "ps",
        help="show what a running server has loaded",
        description="Show the models that a running server has loaded or is loading: their state, memory, running and "
        "waiting requests, and until when they stay.",
        epilog=examples(
            ("millstream ps", "the loaded models of the server on this machine"),
            ("millstream ps --watch", "the same, live, until Ctrl-C"),
            ("millstream ps --all --json", "all models, for a program"),
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument("-a", "--all", action="store_true", help="also show models that are not loaded")
    parser.add_argument("-w", "--watch", action="store_true", help="update every second, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch, one line each time")
    add_server_options(parser.add_argument_group("server"))


def run(arguments: argparse.Namespace) -> int:
    client = ServerClient(arguments.url or DEFAULT_URL, arguments.api_key)
    if not arguments.watch:
        models = loaded_models(client, everything=arguments.all)
        print(_text(models, as_json=arguments.json, indent=2))
        return 0
    try:
        if sys.stdout.isatty() and not arguments.json:
            _watch(client, arguments.all)
        else:
            _log(client, arguments.all, as_json=arguments.json)
    except KeyboardInterrupt:
        return 0


def loaded_models(client: ServerClient, *, everything: bool) -> list[dict[str, Any]]:
    """The fields of `/v1/models`, with `expires_at` of Ollama's `/api/ps`."""
    models = fetch_models(client.url, client.key)
    expires = {fields["name"]: fields["expires_at"] for fields in client.get("/api/ps")["models"]}
    return [
        model | {"expires_at": expires.get(model["id"])}
        for model in models
        if everything or model["state"] != "unloaded"
    ]


def cells(model: dict[str, Any], now: float) -> tuple[str, ...]:
    """One line of the table."""
    limit = model.get("max_batch")
    rows = f"{model.get('active', 0)}/{limit}" if limit else str(model.get("active", 0))
    return (
        str(model["id"]),
        _state(model),
        _kind(model.get("capabilities") or []),
        _size(model.get("memory_bytes") or 0),
        rows,
        str(model.get("waiting", 0)),
        _drafts(model.get("speculation")),
        _until(model, now),
    )


def _text(models: list[dict[str, Any]], *, as_json: bool, indent: int | None = None) -> str:
    if as_json:
        return json.dumps({"models": models}, ensure_ascii=False, indent=indent)
    if not models:
        return "No model is loaded. 'millstream ps --all' shows what the server could load."
    lines = [HEADINGS, *(cells(model, time.time()) for model in models)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _watch(client: ServerClient, everything: bool) -> NoReturn:
    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            live.update(_table(loaded_models(client, everything=everything)), refresh=True)
            time.sleep(INTERVAL)


def _log(client: ServerClient, everything: bool, *, as_json: bool) -> NoReturn:
    """Without a terminal: only what has changed."""
    shown = ""
    while True:
        text = _text(loaded_models(client, everything=everything), as_json=as_json)
        if text != shown:
            print(text, flush=True)
        shown = text
        time.sleep(INTERVAL)


def _table(models: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", caption=None if models else "No model is loaded.")
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold")
    for model in models:
        name, state, *rest = cells(model, time.time())
        table.add_row(Text(name), Text(state, style=_STYLES.get(str(model["state"]), "yellow")), *rest)
    return table


def _state(model: dict[str, Any]) -> str:
    state, progress, phase = str(model["state"]), model.get("progress"), model.get("phase")
    if state == "failed" and model.get("error"):
        return f"failed: {model['error']}"[:60]
    if state == "ready" or progress is None:
        return state
    return f"{state} {progress:.0%}{f' ({phase})' if phase else ''}"


def _kind(capabilities: list[str]) -> str:
    known = [word for name, word in _KINDS.items() if name in capabilities]
    return ", ".join(["text", *known] if "completion" in capabilities else known) or "-"


def _drafts(speculation: dict[str, Any] | None) -> str:
    """How many tokens of drafts were right."""
    drafts = speculation["drafts"] if speculation else []
    proposed = sum(each["proposed"] for each in drafts)
    return f"{sum(each['accepted'] for each in drafts) / proposed:.0%} right" if proposed else "-"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _until(model: dict[str, Any], now: float) -> str:
    """How long the model stays if nobody uses it."""
    if model["state"] != "ready" or not model.get("expires_at"):
        return "-"
    expires = datetime.fromisoformat(str(model["expires_at"])).replace(tzinfo=UTC).timestamp()
    left = expires - now
    if left > _FOREVER:
        return "always"
    if left < 60:
        return "under a minute"
    return f"{left / 60:.0f} min" if left < 7200 else f"{left / 3600:.0f} h"
