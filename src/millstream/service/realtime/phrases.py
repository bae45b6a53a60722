"""Finds phrases in audio as it arrives. No clock and no task: what happened is returned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from millstream.errors import AudioBufferEmpty, AudioBufferFull
from millstream.media.raw_audio import RawDecoder
from millstream.media.voice import PhraseDetector
from millstream.realtime_types import AudioFormat, TurnDetection
from millstream.service.realtime.samples import SampleQueue
from millstream.speech_types import SPEECH_RATE, Samples

PIECE, SHORT_PIECE = 12 * SPEECH_RATE, 6 * SPEECH_RATE
"""Samples of a phrase that goes on, after which its begin is transcribed: at once, or in a pause. The text never lags
far behind."""
CUT_WITHIN = 4 * SPEECH_RATE
"""A cut without a pause falls into the quietest moment of the last samples of the piece."""
PAUSE_SECONDS = 0.2
"""A pause that may become the end of the phrase: its transcription begins before that is sure."""
SAME_END = SPEECH_RATE // 8
"""Samples between the end of a pause and of its phrase, if nothing was heard in between: their tails differ."""
CUT_FRAME = SPEECH_RATE // 10
MAX_SAMPLES = 600 * SPEECH_RATE
"""Audio that may wait for a commit."""
LEAST_COMMIT = SPEECH_RATE // 10


@dataclass(frozen=True, slots=True)
class Began:
    ms: int
    """Where the phrase begins, in milliseconds since the begin of the session."""


@dataclass(frozen=True, slots=True, eq=False)
class Spoken:
    """A piece of a phrase that goes on."""

    samples: Samples


@dataclass(frozen=True, slots=True, eq=False)
class Paused:
    """A piece that is the last one if nobody speaks on."""

    samples: Samples


@dataclass(frozen=True, slots=True)
class Resumed:
    """Somebody speaks on after a pause."""


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """The last piece of a phrase."""

    samples: Samples
    ms: int
    as_paused: bool = False
    """True if it says no more than the last `Paused`."""


Happening = Began | Spoken | Paused | Resumed | Ended


class PhraseFinder:
    """The input audio buffer of a session. Without turn detection, it just collects until `commit`."""

    def __init__(self, audio_format: AudioFormat, turns: TurnDetection | None) -> None:
        self._audio = SampleQueue()
        self._piece: int | None = None
        """In a phrase: the first sample that is not transcribed yet."""
        self._set(audio_format, turns)

    @property
    def speaking(self) -> bool:
        return self._piece is not None

    def configure(self, audio_format: AudioFormat, turns: TurnDetection | None) -> list[Happening]:
        """Later audio has this format. Another turn detection ends the phrase that goes on, none leaves that to
        `commit`."""
        if (audio_format, turns) == (self._format, self._turns):
            return []
        happened = self._end() if self._piece is not None and turns is not None else []
        self._set(audio_format, turns)
        return happened

    def _set(self, audio_format: AudioFormat, turns: TurnDetection | None) -> None:
        self._format, self._turns = audio_format, turns
        self._decoder = RawDecoder(audio_format.encoding, audio_format.rate, SPEECH_RATE)
        self._detector = None if turns is None else _detector(turns, turns.pause_ms / 1000)
        self._pauses = None if turns is None else _detector(turns, PAUSE_SECONDS)
        self._paused: int | None = None
        """Where the pause begins, if nobody speaks at the moment."""
        self._origin = self._audio.end
        """The number of the detector's first sample."""

    def feed(self, data: bytes) -> list[Happening]:
        """Decodes and detects: for much audio, call it on a thread."""
        samples = self._decoder.feed(data)
        if self._detector is None and len(self._audio) + len(samples) > MAX_SAMPLES:
            raise AudioBufferFull(
                f"More than {MAX_SAMPLES // SPEECH_RATE} s of audio wait for a commit. "
                "Send input_audio_buffer.commit or input_audio_buffer.clear."
            )
        self._audio.append(samples)
        return [] if self._detector is None else list(self._detect(self._detector, samples))

    def commit(self) -> list[Happening]:
        """Ends the phrase now. Without one, all of the audio is one."""
        if self._piece is None and len(self._audio) < LEAST_COMMIT:
            held = 1000 * len(self._audio) // SPEECH_RATE
            raise AudioBufferEmpty(
                f"The input audio buffer holds {held} ms of audio; a commit needs at least "
                f"{1000 * LEAST_COMMIT // SPEECH_RATE} ms."
            )
        return self._end()

    def _end(self) -> list[Happening]:
        self._audio.append(self._decoder.flush())
        start = self._audio.start if self._piece is None else self._piece
        ended = Ended(self._audio.between(start, self._audio.end), _ms(self._audio.end))
        self._reset()
        return [ended]

    def clear(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._piece = None
        self._audio.drop_until(self._audio.end)
        self._set(self._format, self._turns)

    def _detect(self, detector: PhraseDetector, samples: Samples) -> Iterator[Happening]:
        for edge in detector.feed(samples):
            at = max(self._origin + edge.position, self._audio.start)
            if edge.kind == "begin" and self._piece is None:
                self._piece = at
                yield Began(_ms(at))
            elif edge.kind == "end" and self._piece is not None:
                yield from self._cut(at)
                as_paused = self._paused is not None and at - self._paused <= SAME_END
                yield Ended(self._audio.between(self._piece, at), _ms(at), as_paused)
                self._piece = None
        if self._piece is None:
            self._audio.drop_until(self._origin + detector.quiet_since)
            self._find_pause(samples)
        else:
            yield from self._cut(self._audio.end)
            yield from self._pause(samples)

    def _find_pause(self, samples: Samples) -> bool | None:
        """True if a pause began, False if it ended, None if nothing changed."""
        assert self._pauses is not None
        edges = self._pauses.feed(samples)
        if not edges:
            return None
        last = edges[-1]
        self._paused = self._origin + last.position if last.kind == "end" else None
        return last.kind == "end"

    def _pause(self, samples: Samples) -> Iterator[Happening]:
        assert self._piece is not None
        began = self._find_pause(samples)
        if began is False:
            yield Resumed()
        elif began and self._paused is not None and self._paused > self._piece:
            piece = self._audio.between(self._piece, self._paused)
            if len(piece) < SHORT_PIECE:
                yield Paused(piece)
            else:
                yield Spoken(piece)
                self._piece = self._paused
                self._audio.drop_until(self._piece)

    def _cut(self, end: int) -> Iterator[Spoken]:
        """Pieces of a long phrase, as far as it is known."""
        assert self._piece is not None
        while end - self._piece > PIECE:
            piece = self._audio.between(self._piece, self._piece + PIECE)
            cut = quietest(piece, len(piece) - CUT_WITHIN)
            yield Spoken(piece[:cut])
            self._piece += cut
            self._audio.drop_until(self._piece)


def quietest(samples: Samples, after: int) -> int:
    """The middle of the quietest moment after a sample."""
    squares = np.cumsum(np.square(samples[after:], dtype=np.float64))
    energy = squares[CUT_FRAME:] - squares[:-CUT_FRAME]
    return after + int(np.argmin(energy)) + CUT_FRAME // 2


def _detector(turns: TurnDetection, silence: float) -> PhraseDetector:
    return PhraseDetector(
        SPEECH_RATE,
        threshold=turns.threshold,
        padding=turns.prefix_padding_ms / 1000,
        silence=silence,
    )


def _ms(sample: int) -> int:
    return 1000 * sample // SPEECH_RATE
