"""How a model speaks: the marks around its thoughts and the format of its calls. From its template and vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from millstream.errors import ModelError
from millstream.text.tool_formats.format import ReasoningMarks, ToolFormat
from millstream.text.tool_formats.gemma import GEMMA_4
from millstream.text.tool_formats.harmony import FORMAT as HARMONY
from millstream.text.tool_formats.registry import FORMATS, tool_format

T = TypeVar("T")

AUTO, NONE = "auto", "none"


def _around(opening: str, closing: str) -> ReasoningMarks:
    return ReasoningMarks((opening,), (closing,))


def _own(each: ToolFormat) -> ReasoningMarks:
    assert each.reasoning is not None
    return each.reasoning


REASONING: Mapping[str, ReasoningMarks] = {
    "think": _around("<think>", "</think>"),
    "thinking": _around("<thinking>", "</thinking>"),
    "mistral": _around("[THINK]", "[/THINK]"),
    "seed": _around("<seed:think>", "</seed:think>"),
    "cohere": _around("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma": _own(GEMMA_4),
    "harmony": _own(HARMONY),
}
"""What `--reasoning-format` knows."""


@dataclass(frozen=True, slots=True)
class Style:
    """`tools` is None where nothing tells the format: the model was not made for tools."""

    tools: ToolFormat | None = None
    reasoning: ReasoningMarks | None = None
    shows_tools: bool = False
    """Whether the template can put tools into a prompt."""
    template: str = ""

    def takes(self, name: str) -> bool:
        """Whether the template speaks of a variable with this name."""
        return name in self.template

    @property
    def names(self) -> tuple[str, str]:
        """For the log."""
        marks = next((name for name, marks in REASONING.items() if marks == self.reasoning), NONE)
        return self.tools.name if self.tools else NONE, marks

    @property
    def markers(self) -> tuple[str, ...]:
        """All that a detokenizer must show of special tokens."""
        found: list[str] = []
        if self.reasoning is not None:
            found += [*self.reasoning.opens, *self.reasoning.closes]
        if (tools := self.tools) is not None:
            found += [mark for block in tools.blocks for mark in (block.start, *block.ends)]
            found += [*tools.silent, *tools.inner]
            written = tools.written
            found += [written.opening, written.before, written.after, written.between, written.closing]
        return tuple(mark for mark in found if mark)


PLAIN = Style()
"""All that it says is content."""


def choose_style(
    template: str | None, has_token: Callable[[str], bool], tools: str = AUTO, reasoning: str = AUTO
) -> Style:
    """`tools` and `reasoning` are names that the user gave, or `auto` or `none`."""
    source = template or ""
    chosen = _named("tool format", tools, FORMATS) if tools not in (AUTO, NONE) else None
    if tools == AUTO:
        chosen = tool_format(source, has_token)
    marks = _named("reasoning format", reasoning, REASONING) if reasoning not in (AUTO, NONE) else None
    if reasoning == AUTO:
        marks = (chosen.reasoning if chosen else None) or _marks(source, has_token)
    return Style(chosen, marks, "tools" in source, source)


def _marks(template: str, has_token: Callable[[str], bool]) -> ReasoningMarks | None:
    for marks in REASONING.values():
        if marks.opens[0] in template and marks.closes[0] in template:
            return marks
    for marks in REASONING.values():
        if has_token(marks.opens[0]) and has_token(marks.closes[0]):
            return marks
    return None


def _named(what: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ModelError(f"there is no {what} {name!r}. Known are: {AUTO}, {NONE}, {', '.join(known)}")
    return known[name]
