"""The messages of speech engines: pieces of a text in, samples out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from millstream.engine.messages import EVENT_BYTES, Command, Finished, Output, Submit

TOKEN_BYTES = 4
"""Tokens travel as 32-bit integers of this machine."""

VoiceMix = tuple[tuple[str, float], ...]
"""Names of voices, each with its share."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is spoken at once: a sentence, or a part of a long one."""

    tokens: bytes = field(default=b"", repr=False)
    """For models that read phonemes. Not in the log, like the text."""
    text: str = field(default="", repr=False)
    """For models that read text."""


@dataclass(frozen=True, slots=True)
class Speak(Submit):
    """Speak the pieces in their order. `Spoken` carries their samples, and `SpeechEnded` ends the request.

    Long texts come piece by piece: sound begins before all of it is prepared, and a client that reads slowly does not
    pile up sound."""

    pieces: tuple[Piece, ...]
    """At least one."""
    voice: VoiceMix = ()
    """Empty: the model's own."""
    speed: float = 1.0
    language: str | None = None
    instructions: str | None = None
    more: bool = False
    """True if `SpeakMore` follows."""


@dataclass(frozen=True, slots=True)
class SpeakMore(Command):
    """The next pieces of a request, perhaps none. Unknown or ended ids are ignored."""

    request_id: int
    pieces: tuple[Piece, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class Spoken(Output):
    """The next samples of a request."""

    may_be_large: ClassVar[bool] = True

    piece: int
    """Which of its pieces they belong to."""
    samples: bytes = field(repr=False)
    """32-bit floats of this machine, from -1 to 1."""
    last: bool
    """True if the piece ends with them."""

    @property
    def nbytes(self) -> int:
        return EVENT_BYTES + len(self.samples)


@dataclass(frozen=True, slots=True)
class SpeechEnded(Finished):
    """All samples of the request were sent, or it was cancelled."""
