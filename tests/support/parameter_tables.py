"""Writes docs/parameters.md: the parameters of each dialect, from the schemas by which the server checks requests."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

REQUESTS = (
    ("OpenAI: chat", "/v1/chat/completions", "openai.md"),
    ("OpenAI: completions", "/v1/completions", "openai.md"),
    ("OpenAI: Responses", "/v1/responses", "responses.md"),
    ("Embeddings", "/v1/embeddings", "embeddings.md"),
    ("Reranking", "/v1/rerank", "embeddings.md"),
    ("Scores", "/v1/score", "embeddings.md"),
    ("Transcription", "/v1/audio/transcriptions", "transcription.md"),
    ("Speech", "/v1/audio/speech", "speech.md"),
    ("Anthropic: Messages", "/v1/messages", "anthropic.md"),
    ("Ollama: chat", "/api/chat", "ollama.md"),
    ("Ollama: generate", "/api/generate", "ollama.md"),
    ("Ollama: embed", "/api/embed", "ollama.md"),
)
INTRODUCTION = """\
# Parameters

Every parameter that a request may have, by dialect. The tables are made from the schemas by which the server checks
requests, and a test holds them equal. `/docs` on a running server shows the same, with the schemas of responses.

`null` always means "not given". Sampling defaults are the model's own, and may be changed: see
[configuration](configuration.md).
"""
IGNORED, REFUSED, OTHER_NAME = "Accepted; ", "Not supported. ", "Another name of "
"""How the descriptions of such parameters begin."""
UNBOUNDED = 2**31 - 1
"""The largest numbers stand for "no limit"."""


def page(document: Schema) -> str:
    return "\n".join([INTRODUCTION, *_sections(document)])


def _sections(document: Schema) -> Iterator[str]:
    shown: dict[str, str] = {}
    for title, path, link in REQUESTS:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = _resolve(document, body)
        yield f"## {title}\n\n`POST {path}`. What is special about it: [{link.removesuffix('.md')}]({link}).\n"
        yield from _tables(document, schema)
        for name, field in sorted(schema["properties"].items()):
            nested = next((part for part in _parts(field) if "$ref" in part), None)
            if nested and _resolve(document, nested).get("properties"):
                first = shown.setdefault(nested["$ref"], title)
                yield f"Fields of `{name}`{':' if first == title else f' as above, in {first}.'}\n"
                if first == title:
                    yield from _tables(document, _resolve(document, nested))


def _tables(document: Schema, schema: Schema) -> Iterator[str]:
    """One row per parameter that does something, and lines for all others."""
    required, fields = set(schema.get("required", ())), dict(schema["properties"])
    others = {
        name: str(fields[name]["description"]).removeprefix(OTHER_NAME) for name in _pop(dict(fields), OTHER_NAME)
    }
    _pop(fields, OTHER_NAME)
    refused = _pop(fields, REFUSED)
    ignored = [*_pop(fields, IGNORED), *_ignored(schema)]
    rows = ["| parameter | value | default | |", "|---|---|---|---|"]
    for name, field in sorted(fields.items(), key=lambda item: (item[0] not in required, item[0])):
        default = "**required**" if name in required else _default(field.get("default"))
        text = " ".join(str(field.get("description", "")).split())
        rows.append(f"| `{name}` | {_escape(_value(document, field))} | {default} | {_escape(text)} |")
    yield "\n".join(rows) + "\n"
    if others:
        told = ", ".join(f"`{name}` for `{main.rstrip('.')}`" for name, main in sorted(others.items()))
        yield textwrap.fill(f"Other names: {told}.", 120, break_on_hyphens=False) + "\n"
    for start, names in (("Accepted without effect", ignored), ("Refused, unless the value has no effect", refused)):
        if names:
            listed = ", ".join(f"`{name}`" for name in sorted(names))
            yield textwrap.fill(f"{start}: {listed}.", 120, break_on_hyphens=False) + "\n"


def _pop(fields: dict[str, Schema], start: str) -> list[str]:
    found = [name for name, field in fields.items() if str(field.get("description", "")).startswith(start)]
    for name in found:
        del fields[name]
    return found


def _default(value: object) -> str:
    return "" if value is None or value in ("", [], {}) or isinstance(value, dict) else f"`{json.dumps(value)}`"


def _ignored(schema: Schema) -> list[str]:
    """The names that a schema's description lists after its own sentence."""
    _, _, names = str(schema.get("description", "")).partition("Parameters without effect are accepted: ")
    return [name.strip() for name in names.removesuffix(".").split(",")] if names else []


def _value(document: Schema, field: Schema) -> str:
    told = dict.fromkeys(_one(document, part) for part in _parts(field))
    return " or ".join(text for text in told if text)


def _parts(field: Schema) -> list[Schema]:
    return list(field.get("anyOf") or field.get("oneOf") or [field])


def _one(document: Schema, schema: Schema) -> str:
    schema = _resolve(document, schema)
    if "const" in schema or "enum" in schema:
        values = [value for value in schema.get("enum", [schema.get("const")]) if value not in (None, "")]
        return ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in values)
    kinds = schema.get("type", "object" if "properties" in schema else "any")
    kinds = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "null"]
    return " or ".join(_kind(document, kind, schema) for kind in kinds)


def _kind(document: Schema, kind: str, schema: Schema) -> str:
    if kind == "array":
        items = _value(document, schema.get("items", {"type": "any"}))
        return f"list of {items}" if items in ("string", "integer", "number") else "list"
    if kind not in ("integer", "number"):
        return kind
    low, high = (schema.get(name, schema.get(short)) for name, short in (("minimum", "ge"), ("maximum", "le")))
    high = None if high is not None and high >= UNBOUNDED else high
    low = None if low is not None and low <= -UNBOUNDED else low
    if low is None and high is None:
        return kind
    if high is None:
        return f"{kind}, {low:g} or more"
    return f"{kind}, {low:g} to {high:g}" if low is not None else f"{kind}, up to {high:g}"


def _resolve(document: Schema, schema: Schema) -> Schema:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
