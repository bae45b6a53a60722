"""Custom tools: they take free text, which may have a grammar. The model sees a function with one string, `input`."""

from __future__ import annotations

import json
import re
from typing import Any

from millstream.api.functions import function_tool
from millstream.errors import BadRequest
from millstream.text.grammars.limits import check_size
from millstream.types import Grammar

_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_SYNTAXES = ("lark", "regex")

_BEGINNING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_COMPLETE = re.compile(
    r"""(?: [^"\\]+
          | \\["\\/bfnrt]
          | \\u[dD][89abAB][0-9a-fA-F]{2} (?: \\u[0-9a-fA-F]{4} | (?=[^\\]) | (?=\\[^u]) )
          | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
        )+""",
    re.VERBOSE,
)
"""Characters and escapes that can be decoded without what follows. The first half of a surrogate pair cannot."""


def custom_tool(name: object, description: object, path: str) -> dict[str, Any]:
    """Returns the function that stands for a custom tool, in the form of `ToolUse`. `path` is for errors."""
    return function_tool(name, description, _PARAMETERS, path=path)


def parse_format(format: object, path: str) -> Grammar | None:
    """The grammar of the input, or None if it is any text. A grammar may stand in `format` or in `format.grammar`."""
    if format is None or (isinstance(format, dict) and format.get("type") == "text"):
        return None
    if not isinstance(format, dict) or format.get("type") != "grammar":
        raise BadRequest(f'{path} must be an object with the type "text" or "grammar".', param=path)
    nested = format.get("grammar")
    grammar, path = (nested, f"{path}.grammar") if isinstance(nested, dict) else (format, path)
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    if syntax not in _SYNTAXES:
        raise BadRequest(f"{path}.syntax must be one of {', '.join(_SYNTAXES)}.", param=f"{path}.syntax")
    if not isinstance(definition, str) or not definition.strip():
        raise BadRequest(f"{path}.definition must be a non-empty string.", param=f"{path}.definition")
    check_size(definition, f"{path}.definition")
    return Grammar("lark" if syntax == "lark" else "regex", definition)


def input_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


class InputDecoder:
    """Decodes the `input` of a custom tool while the JSON of its arguments arrives in pieces."""

    def __init__(self) -> None:
        self._pending = ""
        self._found = False
        self._ended = False

    def push(self, arguments: str) -> str:
        """Takes the next piece of the arguments. Returns the input text that is new with it."""
        self._pending += "" if self._ended else arguments
        if not self._found:
            beginning = _BEGINNING.match(self._pending)
            if beginning is None:
                return ""
            self._found = True
            self._pending = self._pending[beginning.end() :]
        complete = _COMPLETE.match(self._pending)
        text = "" if complete is None else _decoded(complete.group())
        self._pending = self._pending[0 if complete is None else complete.end() :]
        if self._pending.startswith('"'):
            self._pending, self._ended = "", True
        return text

    def rest(self) -> str:
        """Call it once, at the end. If the arguments have another form, they are the input themselves."""
        return "" if self._found else self._pending


def _decoded(escaped: str) -> str:
    text: str = json.loads(f'"{escaped}"', strict=False)
    if text.isascii():
        return text
    # Half a surrogate pair cannot be sent as UTF-8.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
