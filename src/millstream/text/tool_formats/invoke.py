"""Parser shared by MiniMax M2 and DeepSeek V3.2: XML with names in attributes and untyped values."""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import NotACall, Schemas, ToolCall
from millstream.text.tool_formats.values import make_call, typed_call, typed_value

_QUOTES = "\"'"


class InvokeParser:
    """Parses `<invoke>` and `<parameter>` tags. `prefix` precedes each tag's name."""

    def __init__(self, prefix: str = "") -> None:
        tag = re.escape(prefix)
        self._invoke = re.compile(rf"<{tag}invoke name=([^>]+)>(.*?)</{tag}invoke>", re.DOTALL)
        self._parameter = re.compile(
            rf"<{tag}parameter name=([^\s>]+|\"[^\"]*\")(?: string=\"(true|false)\")?>(.*?)</{tag}parameter>", re.DOTALL
        )

    def parse(self, body: str, schemas: Schemas) -> list[ToolCall]:
        calls = [self._call(found[1], found[2], schemas) for found in self._invoke.finditer(body)]
        if not calls or self._invoke.sub("", body).strip():
            raise NotACall("text outside of the calls")
        return calls

    def _call(self, name: str, body: str, schemas: Schemas) -> ToolCall:
        if self._parameter.sub("", body).strip():
            raise NotACall("text outside of the parameters")
        found = self._parameter.findall(body)
        name = name.strip().strip(_QUOTES)
        untyped = {key.strip(_QUOTES): value for key, is_string, value in found if not is_string}
        call = typed_call(name, untyped, schemas)
        declared = {key.strip(_QUOTES): _declared(is_string, value) for key, is_string, value in found if is_string}
        return make_call(name, {**call.arguments, **declared})


def _declared(is_string: str, value: str) -> object:
    """Returns a value whose tag says whether it is a string."""
    return value if is_string == "true" else typed_value(value, None, closed=False)
