"""Recognises an answer that is nothing but tool calls in JSON, written without the markers of the model's format.

    ```json
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    ```

Small models write this although their template asks for markers: a fenced block, bare JSON, or tags that the prompt
used for something else. It counts as calls only if the whole answer is made of them, each names an offered function,
and its arguments fit. Until that is known, the text must be held back.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from millstream.text.output.json_scan import JsonScanner
from millstream.text.output.schema_fit import arguments_fit
from millstream.text.tool_formats.format import NotACall, Schemas, ToolCall
from millstream.text.tool_formats.values import parse_json, to_call

MAX_HELD = 16_384
"""Characters that are held back at most. Longer calls without markers are text."""

_FENCE = "```"
_LANGUAGES = ("json", "jsonc", "xml", "tool_call", "tool_calls", "tool", "function_call", "plaintext", "text")
_TAGS = ("tools", "tool", "tool_call", "tool_calls", "function", "functions", "function_call", "function_calls")
_OPENINGS = (_FENCE, *(f"{_FENCE}{language}" for language in _LANGUAGES), *(f"<{tag}>" for tag in _TAGS))

_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"')
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id", "function"})
"""Keys of a call. An object with any other key is an answer in JSON."""
_MAX_HEAD = 64
"""Characters of a call in which its first key must end."""


class WholeAnswer:
    """Follows an answer as it grows. `schemas`: of the offered functions."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._text = ""
        self._position = 0
        self._step: Callable[[], bool | None] = self._opening
        self._closings: list[str] = []
        self._in_list = False
        self._scanner = JsonScanner()
        self._object_start = 0
        self._calls: list[ToolCall] = []

    def can_be_calls(self, text: str) -> bool:
        """True if an answer that starts with `text` can still turn out to be calls. Each `text` continues the last."""
        self._text = text
        if len(text) > MAX_HELD:
            return False
        while (moved := self._step()) is True:
            pass
        return moved is None

    def calls(self) -> list[ToolCall]:
        """Returns the calls once the answer has ended. Raises `NotACall` if one of them is incomplete."""
        if not self._calls or self._in_list or self._step == self._object:
            raise NotACall("the answer ends before its calls do")
        return self._calls

    # Each step returns True if the next step can run, None to wait for more text, False if this is not a call.

    def _opening(self) -> bool | None:
        """Before the first call: a fence, a tag, a bracket."""
        rest = self._skip_space()
        if not rest:
            return None
        if rest[0] in "{[":
            self._in_list = rest[0] == "["
            self._position += self._in_list
            self._step = self._between
            return True
        if any(len(opening) > len(rest) and opening.startswith(rest) for opening in _OPENINGS):
            return None
        found = max((opening for opening in _OPENINGS if rest.startswith(opening)), key=len, default="")
        is_fence = found.startswith(_FENCE)
        if not found or len(self._closings) == 2 or (is_fence and self._closings):
            return False
        after = rest[len(found) : len(found) + 1]
        if is_fence and not after:
            return None
        if is_fence and not after.isspace() and after not in "{[<":
            return False
        self._closings.insert(0, _FENCE if is_fence else f"</{found[1:]}")
        self._position += len(found)
        return True

    def _between(self) -> bool | None:
        """Where a call may begin."""
        rest = self._skip_space(",;" if self._calls else "")
        if not rest:
            return None
        if rest[0] == "{":
            self._object_start, self._scanner, self._step = self._position, JsonScanner(), self._object
            return True
        if self._in_list and rest[0] == "]" and self._calls:
            self._in_list = False
            self._position += 1
            self._step = self._closing
            return True
        if self._in_list or not self._calls:
            return False
        self._step = self._closing
        return True

    def _object(self) -> bool | None:
        self._position += self._scanner.feed(self._text[self._position :])[1]
        if self._scanner.invalid:
            return False
        source = self._text[self._object_start : self._position]
        if not self._can_begin_call(source):
            return False
        if not self._scanner.done:
            return None
        try:
            self._calls.append(self._call(source))
        except NotACall:
            return False
        self._step = self._between
        return True

    def _can_begin_call(self, source: str) -> bool:
        """False if the start of an object shows already that it is not a call, so that nothing is held back longer."""
        head = source[:_MAX_HEAD]
        key = _FIRST_KEY.match(head)
        if key is None:
            return len(head) < _MAX_HEAD
        name = _NAME.match(source[: 4 * _MAX_HEAD])
        return key[1] in _KEYS and (name is None or name[1] in self._schemas)

    def _call(self, source: str) -> ToolCall:
        value = parse_json(source)
        function = value.get("function")
        named = function if isinstance(function, dict) else value
        if not (value.keys() | named.keys()) <= _KEYS or not named.keys() & {"arguments", "parameters"}:
            raise NotACall("not the keys of a call")
        call = to_call(value)
        if call.name not in self._schemas or not arguments_fit(call.arguments, self._schemas[call.name]):
            raise NotACall("not a call of an offered function")
        return call

    def _closing(self) -> bool | None:
        """After the calls: nothing but the ends of what was opened."""
        rest = self._skip_space()
        if not rest:
            return None
        if not self._closings or not (rest.startswith(self._closings[0]) or self._closings[0].startswith(rest)):
            return False
        if not rest.startswith(self._closings[0]):
            return None
        self._position += len(self._closings.pop(0))
        return True

    def _skip_space(self, more: str = "") -> str:
        """Skips white space and the characters of `more`. Returns a piece of what follows."""
        while (char := self._text[self._position : self._position + 1]) and (char.isspace() or char in more):
            self._position += 1
        return self._text[self._position : self._position + 32]
