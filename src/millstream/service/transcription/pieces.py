"""The windows of one request in the order of its audio: which are to be sent, which are done. No asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.engine.transcription.messages import WindowText
from millstream.speech_types import SPEECH_RATE, Segment, Word

LEAST_REST = 0.5
"""Seconds: a shorter rest of a window is not heard again."""


@dataclass(slots=True)
class Piece:
    """A window. `begin` and `end` are in samples of the whole audio."""

    index: int
    begin: int
    end: int
    sent: bool = False
    segments: list[Segment] | None = None
    """None until its text is there."""


class Pieces:
    def __init__(self, windows: Sequence[tuple[int, int]]) -> None:
        self._pieces = [Piece(index, begin, end) for index, (begin, end) in enumerate(windows)]
        self._count = len(self._pieces)
        """Numbers that were given out."""
        self._in_engine = 0

    @property
    def in_engine(self) -> int:
        return self._in_engine

    @property
    def complete(self) -> bool:
        """True if the text of every window is there."""
        return all(piece.segments is not None for piece in self._pieces)

    def send_next(self) -> Piece | None:
        """The next window to send, or None."""
        for piece in self._pieces:
            if not piece.sent:
                piece.sent = True
                self._in_engine += 1
                return piece
        return None

    def seconds(self, index: int) -> float:
        """The length of a window that is in the engine."""
        piece = next(piece for piece in self._pieces if piece.index == index)
        return (piece.end - piece.begin) / SPEECH_RATE

    def heard(self, text: WindowText) -> tuple[int, int] | None:
        """Books the text of a window. Returns the rest of it, in samples, if the model has stopped before its end."""
        piece = next(piece for piece in self._pieces if piece.index == text.index)
        self._in_engine -= 1
        piece.segments = [_segment(piece, text, place) for place in range(len(text.segments))]
        if text.consumed is None:
            return None
        middle = piece.begin + round(text.consumed * SPEECH_RATE)
        return (middle, piece.end) if piece.end - middle >= LEAST_REST * SPEECH_RATE else None

    def hear_again(self, begin: int, end: int) -> None:
        """Adds the rest of a window as a window of its own."""
        place = next(place for place, piece in enumerate(self._pieces) if piece.end == end)
        self._pieces.insert(place + 1, Piece(self._count, begin, end))
        self._pieces[place].end = begin
        self._count += 1

    def take_ready(self) -> list[Segment]:
        """The segments of all windows from the begin on whose text is there. Each is given once."""
        ready: list[Segment] = []
        while self._pieces and (first := self._pieces[0].segments) is not None:
            ready += first
            del self._pieces[0]
        return ready


def _segment(piece: Piece, text: WindowText, place: int) -> Segment:
    """With times in seconds from the begin of the audio."""
    found = text.segments[place]
    offset = piece.begin / SPEECH_RATE
    last = piece.end / SPEECH_RATE
    return Segment(
        start=round(min(offset + found.start, last), 3),
        end=round(min(offset + found.end, last), 3),
        text=found.text,
        tokens=found.tokens,
        temperature=text.temperature,
        avg_logprob=text.avg_logprob,
        compression_ratio=text.compression_ratio,
        no_speech_prob=text.no_speech_prob,
        words=tuple(
            Word(
                word.text,
                round(min(offset + word.start, last), 3),
                round(min(offset + word.end, last), 3),
                word.probability,
            )
            for word in found.words
        ),
    )
