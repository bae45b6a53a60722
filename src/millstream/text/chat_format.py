"""A model's chat format: its tool-call format and its reasoning markers, detected from chat template and vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from millstream.errors import ModelError
from millstream.text.tool_formats.format import ReasoningMarkers, ToolFormat
from millstream.text.tool_formats.gemma import GEMMA_4
from millstream.text.tool_formats.harmony import FORMAT as HARMONY
from millstream.text.tool_formats.registry import FORMATS, detect_tool_format

T = TypeVar("T")

AUTO, NONE = "auto", "none"


def _tags(opening: str, closing: str) -> ReasoningMarkers:
    return ReasoningMarkers((opening,), (closing,))


def _markers_of(tools: ToolFormat) -> ReasoningMarkers:
    assert tools.reasoning is not None
    return tools.reasoning


REASONING: Mapping[str, ReasoningMarkers] = {
    "think": _tags("<think>", "</think>"),
    "thinking": _tags("<thinking>", "</thinking>"),
    "mistral": _tags("[THINK]", "[/THINK]"),
    "seed": _tags("<seed:think>", "</seed:think>"),
    "cohere": _tags("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma": _markers_of(GEMMA_4),
    "harmony": _markers_of(HARMONY),
}
"""Reasoning formats by name: the values of `--reasoning-format`."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model writes tool calls and reasoning, and what its chat template supports."""

    tools: ToolFormat | None = None
    """None if neither template nor vocabulary tells the format: the model was not trained for tools."""
    reasoning: ReasoningMarkers | None = None
    template_has_tools: bool = False
    """True if the template can render tools into a prompt."""
    template: str = ""

    def mentions(self, name: str) -> bool:
        """True if the template mentions a variable of this name."""
        return name in self.template

    @property
    def names(self) -> tuple[str, str]:
        """The names of the tool-call format and the reasoning format, for the log."""
        reasoning = next((name for name, markers in REASONING.items() if markers == self.reasoning), NONE)
        return self.tools.name if self.tools else NONE, reasoning

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the format. Special tokens among them must survive detokenization."""
        found: list[str] = []
        if self.reasoning is not None:
            found += [*self.reasoning.opens, *self.reasoning.closes]
        if (tools := self.tools) is not None:
            found += [marker for block in tools.blocks for marker in (block.start, *block.ends)]
            found += [*tools.hidden_markers, *tools.inner_markers]
            syntax = tools.syntax
            found += [syntax.opening, syntax.before, syntax.after, syntax.between, syntax.closing]
        return tuple(marker for marker in found if marker)


PLAIN = ChatFormat()
"""No tools and no reasoning: all output is content."""


def detect_chat_format(
    template: str | None, has_token: Callable[[str], bool], tools: str = AUTO, reasoning: str = AUTO
) -> ChatFormat:
    """Detects a model's chat format. `tools` and `reasoning` are the names of formats, `auto` or `none`.

    Raises `ModelError` if there is no format of a given name.
    """
    source = template or ""
    tool_format = _lookup("tool format", tools, FORMATS) if tools not in (AUTO, NONE) else None
    if tools == AUTO:
        tool_format = detect_tool_format(source, has_token)
    markers = _lookup("reasoning format", reasoning, REASONING) if reasoning not in (AUTO, NONE) else None
    if reasoning == AUTO:
        markers = (tool_format.reasoning if tool_format else None) or _detect_reasoning(source, has_token)
    return ChatFormat(tool_format, markers, "tools" in source, source)


def _detect_reasoning(template: str, has_token: Callable[[str], bool]) -> ReasoningMarkers | None:
    for markers in REASONING.values():
        if markers.opens[0] in template and markers.closes[0] in template:
            return markers
    for markers in REASONING.values():
        if has_token(markers.opens[0]) and has_token(markers.closes[0]):
            return markers
    return None


def _lookup(what: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ModelError(f"there is no {what} {name!r}. Use one of: {AUTO}, {NONE}, {', '.join(known)}")
    return known[name]
