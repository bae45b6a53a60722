"""A step of a speech engine as data: begin to speak a batch of pieces, or go on with one."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.engine.protocols import Backend
from millstream.engine.speech.messages import Piece, Speak, VoiceMix
from millstream.model_facts import SpeechFacts


@dataclass(frozen=True, slots=True)
class PieceInput:
    """A piece with all that a model needs to speak it."""

    request_id: int
    index: int
    """Its number among the pieces of its request."""
    piece: Piece
    voice: VoiceMix = ()
    speed: float = 1.0
    language: str | None = None
    instructions: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class SpeechPlan:
    batch: int
    """The number of the batch that the step works on."""
    begin: tuple[PieceInput, ...] = ()
    """The pieces of the batch, in its first step only."""
    dropped: tuple[int, ...] = ()
    """Batches that nobody wants any more: free what they hold."""


@dataclass(frozen=True, slots=True)
class SpeechResult:
    samples: tuple[bytes, ...]
    """The next samples of each piece of the batch, in its order. Empty where there are none in this step."""
    done: bool
    """True if the whole batch is spoken."""


SpeechBackend = Backend[Speak, SpeechPlan, SpeechResult, SpeechFacts]
