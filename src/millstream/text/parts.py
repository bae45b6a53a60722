"""The parts of a model's text, and a call that is told while it is still being written. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from millstream.text.json_scan import JsonScanner


class Kind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()
    """A call begins; the text is the function's name."""
    ARGUMENTS = auto()
    """The next piece of its arguments, as JSON."""
    VOID = auto()
    """The call that began last came to nothing: its whole text follows as content."""
    MARKUP = auto()
    """Markers and blanks around them, which no client sees."""


@dataclass(frozen=True, slots=True)
class Part:
    """`text` is for the client, `source` is what the model wrote for it. All sources, less those of void calls,
    are the whole text."""

    kind: Kind
    text: str
    source: str


class StreamedCall:
    """A call whose arguments are JSON, from its head on."""

    def __init__(self, head: str, name: str) -> None:
        self._name = name.strip().removeprefix("functions.")
        self.head = head
        self._scanner = JsonScanner()
        self._read: list[str] = []
        self._untold = ""
        self._pending = ""
        self.told = False

    def feed(self, text: str) -> int:
        """Read on; how much of the text belongs to the call."""
        arguments, used = self._scanner.feed(text)
        self._read.append(text[:used])
        self._untold += text[:used]
        self._pending += arguments
        return used

    @property
    def done(self) -> bool:
        return self._scanner.done

    @property
    def broken(self) -> bool:
        return self._scanner.broken

    @property
    def source(self) -> str:
        return self.head + "".join(self._read)

    @property
    def tellable(self) -> bool:
        """A brace alone could be the beginning of something else than JSON: `{'city'`."""
        return self.told or self._pending.rstrip() != "{"

    def tell(self) -> list[Part]:
        """What is new of it."""
        parts: list[Part] = []
        if not self.tellable:
            return parts
        if not self.told:
            parts.append(Part(Kind.CALL, self._name, self.head))
            self.told = True
        if self._untold:
            parts.append(Part(Kind.ARGUMENTS, self._pending, self._untold))
        self._untold = self._pending = ""
        return parts
