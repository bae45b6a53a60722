"""`serve --show-config`: every option in force and where it is set, as a table or as JSON. Secrets are hidden."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from millstream.cli.serve_options import GROUPS, OPTIONS
from millstream.cli.serve_options.option import Option
from millstream.cli.settings import DEFAULT, Origin, ServeConfig
from millstream.config import ModelSpec, ToolServerSpec
from millstream.models.source import name_of

HIDDEN = "(hidden)"


def as_json(config: ServeConfig) -> str:
    """`value` is null if nothing is set and the default depends on the machine or the model."""
    document = {
        "config_file": None if config.file.path is None else str(config.file.path),
        "options": {
            name: {
                "value": _plain(_without_secrets(option, config.values[name])),
                "from": config.origins[name].place,
                "where": config.origins[name].where or None,
                "flag": option.flag if "flag" in option.places else None,
                "variable": option.variable,
            }
            for name, option in OPTIONS.items()
        },
        "models": [
            {
                "name": _name(spec),
                "from": origin.place,
                "where": origin.where or None,
                "options": dict(_set_fields(spec)),
            }
            for spec, origin in _models(config)
        ],
        "mcp_servers": [{"name": server.label, "target": _target(server)} for server in config.settings.tool_servers],
        "warnings": list(config.warnings),
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def as_table(config: ServeConfig) -> str:
    """Lines of three columns: the option, where it is set, its value."""
    sections = [("Models", [(_name(spec), origin, _describe(spec)) for spec, origin in _models(config)])]
    for group in GROUPS:
        rows = [
            (option.name, origin, _shown(option, config.values[option.name], origin))
            for option in group.options
            for origin in [config.origins[option.name]]
        ]
        sections.append((group.title[0].upper() + group.title[1:], rows))
    if servers := config.settings.tool_servers:
        places = [Origin("file", config.file.place_of("mcp", "servers", each.label)) for each in servers]
        rows = [(each.label, origin, _target(each)) for each, origin in zip(servers, places, strict=True)]
        sections.append(("MCP servers", rows))
    names, places_width = _widths([row for _, rows in sections for row in rows])
    lines = [f"Config file: {config.file.path or 'none was read'}"]
    for title, rows in sections:
        lines += ["", title]
        lines += [f"  {name:<{names}}  {_short(origin):<{places_width}}  {value}" for name, origin, value in rows]
    lines += [f"\nWarning: {warning}" for warning in config.warnings]
    return "\n".join(lines)


def _widths(rows: Sequence[tuple[str, Origin, str]]) -> tuple[int, int]:
    """Of the first two columns. One long name of a model does not move all the others."""
    return max(len(name) for name in OPTIONS), max(len(_short(origin)) for _, origin, _ in rows)


def _short(origin: Origin) -> str:
    """The file's name is enough: the first line has its path."""
    return Path(origin.where).name if origin.place == "file" else str(origin)


def _models(config: ServeConfig) -> Sequence[tuple[ModelSpec, Origin]]:
    return list(zip(config.settings.specs, config.model_origins, strict=True))


def _name(spec: ModelSpec) -> str:
    return spec.name or name_of(spec.source)


def _set_fields(spec: ModelSpec) -> Iterable[tuple[str, Any]]:
    """What a model sets itself, by the keys of the config file."""
    yield "source", spec.source or "demo"
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name not in ("source", "name") and value != field.default:
            name = "alias" if field.name == "aliases" else field.name
            yield name, dict(value) if name == "sampling" else _plain(value)


def _describe(spec: ModelSpec) -> str:
    source, *rest = _set_fields(spec)
    more = ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in rest)
    return f"{source[1]}; {more}" if more else str(source[1])


def _shown(option: Option, value: Any, origin: Origin) -> str:
    if origin is DEFAULT:
        return option.shown_default
    return str(_without_secrets(option, value)) if option.secret else option.value.show(value)


def _without_secrets(option: Option, value: Any) -> Any:
    return HIDDEN if option.secret and value else value


def _target(server: ToolServerSpec) -> str:
    """The program or the host. Arguments and the rest of a URL may hold secrets."""
    if server.command is not None:
        return server.command
    parts = urlsplit(server.url or "")
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple | list | frozenset) else value
