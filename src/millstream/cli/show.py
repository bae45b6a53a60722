"""`millstream show`: all about one model, on disk or on a running server."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.cli.cache_options import add_cache_dir
from millstream.cli.parser import examples
from millstream.cli.served_models import fetch_models, find_fields
from millstream.errors import MillstreamError, NotFound
from millstream.models.nearby import did_you_mean
from millstream.models.sizes import size_text

if TYPE_CHECKING:
    from millstream.loading.inspection import Inspection, MemoryNeed
    from millstream.models.source import ModelSource

_DEVICES = {"cpu": "CPU", "cuda": "GPU", "metal": "GPU"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "show",
        help="show what is known of a model",
        description="Show what is known of a model without loading it: architecture, parameters, quantisation, "
        "context, formats, licence, and the memory that it needs. With --url: a model of a running server.",
        epilog=examples(
            ("millstream show demo", "the demo model"),
            ("millstream show ./my-model --template", "only its chat template"),
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a .gguf file, a downloaded hub id or demo; with --url a served name"
    )
    parser.add_argument("--url", default=None, help="ask this server instead of the disk, e.g. http://127.0.0.1:8000")
    parser.add_argument(
        "--api-key", default=os.environ.get("MILLSTREAM_API_KEY"), help="for --url; default: MILLSTREAM_API_KEY"
    )
    parser.add_argument("--template", action="store_true", help="print the chat template and nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_cache_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.url is not None:
            fields = _served(arguments.url.rstrip("/"), arguments.api_key, arguments.model)
        else:
            from millstream.loading.inspection import inspect  # a second, which other commands do without

            fields = disk_fields(inspect(find(arguments.model, arguments.cache_dir)))
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        return 1
    if arguments.template:
        print(fields.get("template") or "")
        return 0 if fields.get("template") else 1
    print(json.dumps(fields, indent=2) if arguments.json else as_text(fields))
    return 0


def find(name: str, cache_dir: Path | None) -> ModelSource:
    """The model on this machine. Raises `NotFound` with names that are like it."""
    from millstream.models.cached_models import cached_models
    from millstream.models.source import find_local

    source = find_local(name, cache_dir=cache_dir)
    if source is not None:
        return source
    if name.startswith((".", "/", "~")):
        raise NotFound(f"no such folder or file: {name}")
    models = cached_models(cache_dir)
    for model in models:
        if model.name == name and model.is_complete:
            return model.source
    if any(model.name == name for model in models):
        raise NotFound(f"{name} is not complete. Continue its download: millstream pull {name}")
    hint = did_you_mean(name, (model.name for model in models))
    raise NotFound(
        f"{name} is not on this machine.{hint} 'millstream list' shows what is; 'millstream pull' downloads."
    )


def disk_fields(found: Inspection) -> dict[str, Any]:
    files, need = found.files, found.memory
    tools, reasoning = found.chat_format.names
    return {
        "name": found.source.name,
        "path": str(found.source.path),
        "kind": found.kind,
        "format": files.format if files else None,
        "architecture": files.family if files else None,
        "parameters": files.parameters if files else None,
        "quantization": files.quantization if files else None,
        "context_length": files.context_length if files else None,
        "file_bytes": files.file_bytes if files else None,
        "capabilities": list(found.capabilities),
        "tool_format": tools if found.generates else None,
        "reasoning_format": reasoning if found.generates else None,
        "sampling": dict(found.sampling) if found.generates else None,
        "licence": found.licence,
        "memory": None if need is None else _memory_fields(need),
        "notes": list(found.notes),
        "template": found.chat_format.template or None,
    }


def _memory_fields(need: MemoryNeed) -> dict[str, Any]:
    return {
        "device": need.device,
        "weight_bytes": need.weights,
        "kv_bytes_per_token": need.kv_per_token,
        "minimum_bytes": need.minimum,
        "wanted_bytes": need.wanted,
        "available_bytes": need.available,
        "fits": None if need.available is None else need.minimum <= need.available,
    }


def _served(url: str, key: str | None, name: str) -> dict[str, Any]:
    models = fetch_models(url, key)
    fields = find_fields(models, name)
    if fields is None:
        names = [str(model["id"]) for model in models]
        raise NotFound(
            f"The server at {url} has no model {name!r}.{did_you_mean(name, names)} Its models: {', '.join(names)}."
        )
    return dict(fields)


def as_text(fields: Mapping[str, Any]) -> str:
    """One line per field; those that are not known are left out."""
    lines = [
        (label, _value(key, fields[key])) for key, label in _LABELS.items() if fields.get(key) not in (None, [], {}, "")
    ]
    lines += [(key, str(value)) for key, value in fields.items() if key not in _SHOWN and value not in (None, [], "")]
    if "template" in fields:
        text = "yes (print it with --template)" if fields["template"] else "none: for plain completions"
        lines.append(("Chat template", text))
    if isinstance(need := fields.get("memory"), dict):
        lines += _memory_lines(need)
    lines += [("Note", note) for note in fields.get("notes", ())]
    width = max(len(label) for label, _ in lines) + 2
    return "\n".join(f"{label:{width}}{text}" for label, text in lines)


_LABELS = {
    "id": "Name", "name": "Name", "state": "State", "phase": "Phase", "path": "Path", "kind": "Kind",
    "architecture": "Architecture", "parameters": "Parameters", "quantization": "Quantisation",
    "context_length": "Context", "file_bytes": "Size on disk", "capabilities": "Capabilities",
    "tool_format": "Tool calls", "reasoning_format": "Reasoning", "sampling": "Sampling", "licence": "Licence",
    "memory_bytes": "Memory in use", "speculation": "Drafts", "aliases": "Aliases", "error": "Error",
}  # fmt: skip
_SHOWN = {*_LABELS, "template", "memory", "notes", "format", "object", "created", "owned_by"}


def _value(key: str, value: Any) -> str:
    if key == "parameters":
        return _count(value)
    if key == "context_length":
        return f"{value:,} tokens"
    if key.endswith("_bytes"):
        return size_text(value)
    if key == "speculation":
        return _drafts(value)
    if key == "sampling":
        named = ", ".join(f"{name} {number:g}" for name, number in value.items())
        return f"{named} (as its files recommend; a request or the configuration may say otherwise)"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _drafts(speculation: Mapping[str, Any]) -> str:
    """Who drafts, and what came of it."""
    text = f"by {', '.join(speculation['drafters'])}"
    drafts = [each for each in speculation["drafts"] if each["proposed"]]
    if drafts:
        right = ", ".join(f"{each['drafter']} {each['accepted']:,} of {each['proposed']:,} right" for each in drafts)
        text += f"; {right}; steps that verify them give {speculation['gain']} times as many tokens per second"
    return text


def _count(value: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:,}"


def _memory_lines(need: Mapping[str, Any]) -> list[tuple[str, str]]:
    device = _DEVICES[need["device"]]
    per_token = (
        f" and {size_text(need['kv_bytes_per_token'])} per token of context" if need["kv_bytes_per_token"] else ""
    )
    lines = [("Memory", f"about {size_text(need['weight_bytes'])} for weights{per_token} on this machine's {device}")]
    available = need["available_bytes"]
    if available is None:
        return lines
    has = f"this machine's {device} has {size_text(available)}"
    if not need["fits"]:
        return [*lines, ("", f"It does not fit: it needs {size_text(need['minimum_bytes'])} at least, and {has}.")]
    enough = need["wanted_bytes"] <= available
    text = "It fits" if enough else f"It fits with a short context ({size_text(need['wanted_bytes'])} would be better)"
    return [*lines, ("", f"{text}: {has}.")]
