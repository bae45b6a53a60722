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

PIECE = 12 * SPEECH_RATE
"""Samples of a phrase that goes on, after which its begin is transcribed: the text never lags far behind."""
CUT_WITHIN = 4 * SPEECH_RATE
"""Such a cut falls into the quietest moment of the last samples of the piece."""
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
class Ended:
    """The last piece of a phrase."""

    samples: Samples
    ms: int


Happening = Began | Spoken | Ended


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
        self._detector = None if turns is None else _detector(turns)
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
                yield Ended(self._audio.between(self._piece, at), _ms(at))
                self._piece = None
        if self._piece is None:
            self._audio.drop_until(self._origin + detector.quiet_since)
        else:
            yield from self._cut(self._audio.end)

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


def _detector(turns: TurnDetection) -> PhraseDetector:
    return PhraseDetector(
        SPEECH_RATE,
        threshold=turns.threshold,
        padding=turns.prefix_padding_ms / 1000,
        silence=turns.pause_ms / 1000,
    )


def _ms(sample: int) -> int:
    return 1000 * sample // SPEECH_RATE
