"""The typed parts of a model's output, and tool calls that are streamed while the model writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from millstream.text.output.json_scan import JsonScanner


class PartKind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()
    """A tool call begins. The text is the function's name."""
    ARGUMENTS = auto()
    """The next piece of the call's arguments, as JSON."""
    VOID = auto()
    """The last call that began is invalid and must be discarded. Its whole source follows as content."""
    MARKUP = auto()
    """Markers and the white space around them, which clients do not see."""


@dataclass(frozen=True, slots=True)
class Part:
    """`text` is for the client, `source` is what the model wrote.

    The sources of all parts, except those of void calls, join to the complete output.
    """

    kind: PartKind
    text: str
    source: str


def complete_calls(calls: Sequence[tuple[str, str]], source: str) -> list[Part]:
    """Returns the parts of complete calls, given as names and arguments. `source` is the text of all of them."""
    parts: list[Part] = []
    for name, arguments in calls:
        parts += [Part(PartKind.CALL, name, source), Part(PartKind.ARGUMENTS, arguments, "")]
        source = ""
    return parts


class StreamedCall:
    """A tool call with JSON arguments that is still being written. `head` is its source up to the arguments."""

    def __init__(self, head: str, name: str) -> None:
        self.name = name.strip().removeprefix("functions.")
        self.head = head
        self._scanner = JsonScanner()
        self._consumed: list[str] = []
        self._new_source = ""
        self._new_arguments = ""
        self.emitted = False
        """True once its first part was emitted."""

    def feed(self, text: str) -> int:
        """Consumes more text. Returns how many characters belong to the call."""
        arguments, used = self._scanner.feed(text)
        self._consumed.append(text[:used])
        self._new_source += text[:used]
        self._new_arguments += arguments
        return used

    @property
    def done(self) -> bool:
        return self._scanner.done

    @property
    def invalid(self) -> bool:
        return self._scanner.invalid

    @property
    def source(self) -> str:
        return self.head + "".join(self._consumed)

    @property
    def can_emit(self) -> bool:
        """False after a brace alone, which need not be JSON: `{'city'`."""
        return self.emitted or self._new_arguments.rstrip() != "{"

    def take_parts(self) -> list[Part]:
        """Returns the parts that are new since the last call."""
        parts: list[Part] = []
        if not self.can_emit:
            return parts
        if not self.emitted:
            parts.append(Part(PartKind.CALL, self.name, self.head))
            self.emitted = True
        if self._new_source:
            parts.append(Part(PartKind.ARGUMENTS, self._new_arguments, self._new_source))
        self._new_source = self._new_arguments = ""
        return parts
