"""Schemas of the tools that Anthropic defines and the client runs: such a tool is sent by its type alone.

Anthropic's models know these tools from their training. Other models need to be told, as of any other function.
"""

from __future__ import annotations

import re
from typing import Any

_TEXT: dict[str, Any] = {"type": "string"}
_LINE: dict[str, Any] = {"type": "integer"}
_LINES: dict[str, Any] = {"type": "array", "items": _LINE, "minItems": 2, "maxItems": 2}


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _described(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


_EDIT = {
    "path": _described(_TEXT, "The path of the file or folder."),
    "view_range": _described(_LINES, "For view: the first and the last line. -1 is the end of the file."),
    "file_text": _described(_TEXT, "For create: the contents of the file."),
    "old_str": _described(_TEXT, "For str_replace: the text to replace. It must occur exactly once."),
    "new_str": _described(_TEXT, "For str_replace: the text to put in its place."),
    "insert_line": _described(_LINE, "For insert: the line after which to insert. 0 is the start of the file."),
    "insert_text": _described(_TEXT, "For insert: the text to insert."),
}
_MOVE = {
    "old_path": _described(_TEXT, "For rename: the old path."),
    "new_path": _described(_TEXT, "For rename: the new path."),
}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


KNOWN: tuple[tuple[re.Pattern[str], str, dict[str, Any]], ...] = (
    (
        re.compile(r"bash_\d{8}"),
        "Runs a command in a bash session that stays open between calls. Returns what the command prints.",
        _object(
            [],
            command=_described(_TEXT, "The command to run."),
            restart=_described({"type": "boolean"}, "True to restart the session, instead of a command."),
        ),
    ),
    (
        re.compile(r"text_editor_\d{8}"),
        "Views, creates and edits text files.",
        _object(["command", "path"], command=_commands("view", "create", "str_replace", "insert"), **_EDIT),
    ),
    (
        re.compile(r"memory_\d{8}"),
        "Keeps notes between conversations, as files below /memories. View that folder first.",
        _object(
            ["command"],
            command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDIT,
            **_MOVE,
        ),
    ),
)
"""The types of these tools, with the descriptions and schemas that the model sees."""


def definition(kind: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the description and the schema of a tool of this type. None: it is not one of these."""
    return next(((text, schema) for pattern, text, schema in KNOWN if pattern.fullmatch(kind)), None)
