"""One state machine from a model's text to what a client sees: content, thoughts, calls, and the end by a stop string.

Stop strings count in the content alone: a brace in some arguments or a word of a thought ends no answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from millstream.text.parts import Kind, Part
from millstream.text.split import Splitter
from millstream.text.stops import StopMatcher
from millstream.text.style import Style
from millstream.text.tool_formats.format import Schemas


class Output:
    """Push text as it comes, in any pieces; `ended` says that nothing more is wanted."""

    __slots__ = ("_splitter", "_stops", "ended", "endless")

    def __init__(
        self,
        style: Style | None = None,
        schemas: Schemas | None = None,
        *,
        thinking: bool = False,
        stops: Sequence[str] = (),
        single: bool = False,
    ) -> None:
        """No style: all is content. `single`: the answer ends after one call."""
        self._splitter = None if style is None else Splitter(style, schemas, thinking=thinking, single=single)
        self._stops = StopMatcher(stops) if stops else None
        self.ended = False
        self.endless = not stops and not single
        """Whether no text can end it."""

    @property
    def thinking(self) -> bool:
        """Whether the text is inside a block of thoughts now."""
        return self._splitter is not None and self._splitter.thinking

    @property
    def calls(self) -> int:
        return 0 if self._splitter is None else self._splitter.calls

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text. None while none has matched."""
        return None if self._stops is None else self._stops.matched

    def push(self, text: str) -> list[Part]:
        if self.ended:
            return []
        parts = [Part(Kind.CONTENT, text, text)] if self._splitter is None else self._splitter.push(text)
        return self._watched(parts)

    def finish(self) -> list[Part]:
        if self.ended:
            return []
        parts = self._watched([] if self._splitter is None else self._splitter.finish())
        if self._stops is not None and self._stops.matched is None and not self.ended:
            rest = self._stops.finish()
            parts.append(Part(Kind.CONTENT, rest, rest))
            self.ended = self._stops.matched is not None
        return parts

    def _watched(self, parts: list[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            found.append(part if part.kind is not Kind.CONTENT else self._content(part))
            if self.ended:
                break
        self.ended = self.ended or (self._splitter is not None and self._splitter.ended)
        return found

    def _content(self, part: Part) -> Part:
        if self._stops is None:
            return part
        text = self._stops.push(part.text)
        self.ended = self._stops.matched is not None
        return Part(Kind.CONTENT, text, text)


@dataclass(slots=True)
class Message:
    """An answer put together: what a client that streams ends up with."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part.kind:
                case Kind.CONTENT:
                    self.content += part.text
                case Kind.REASONING:
                    self.reasoning += part.text
                case Kind.CALL:
                    self.calls.append((part.text, ""))
                case Kind.ARGUMENTS:
                    name, arguments = self.calls[-1]
                    self.calls[-1] = (name, arguments + part.text)
                case Kind.VOID:
                    self.calls.pop()
