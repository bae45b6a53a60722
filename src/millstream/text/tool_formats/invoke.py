"""What MiniMax M2 and DeepSeek V3.2 share: XML with the names in attributes, values without types."""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import NotACall, Schemas, ToolCall
from millstream.text.tool_formats.values import checked, typed, typed_value

_QUOTES = "\"'"


class InvokeReader:
    """`prefix` stands before each tag's name."""

    def __init__(self, prefix: str = "") -> None:
        tag = re.escape(prefix)
        self._invoke = re.compile(rf"<{tag}invoke name=([^>]+)>(.*?)</{tag}invoke>", re.DOTALL)
        self._parameter = re.compile(
            rf"<{tag}parameter name=([^\s>]+|\"[^\"]*\")(?: string=\"(true|false)\")?>(.*?)</{tag}parameter>", re.DOTALL
        )

    def read(self, body: str, schemas: Schemas) -> list[ToolCall]:
        calls = [self._call(found[1], found[2], schemas) for found in self._invoke.finditer(body)]
        if not calls or self._invoke.sub("", body).strip():
            raise NotACall("text beside the calls")
        return calls

    def _call(self, name: str, body: str, schemas: Schemas) -> ToolCall:
        if self._parameter.sub("", body).strip():
            raise NotACall("text beside the parameters")
        found = self._parameter.findall(body)
        name = name.strip().strip(_QUOTES)
        call = typed(name, {key.strip(_QUOTES): value for key, kind, value in found if not kind}, schemas)
        marked = {key.strip(_QUOTES): _marked(kind, value) for key, kind, value in found if kind}
        return checked(name, {**call.arguments, **marked})


def _marked(kind: str, value: str) -> object:
    """The tag itself says whether the value is a text."""
    return value if kind == "true" else typed_value(value, None, closed=False)
