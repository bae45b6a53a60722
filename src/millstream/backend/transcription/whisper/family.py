"""Whisper as a family of transcription models: rows of many requests advance together. Owner only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from millstream.backend.transcription.family import Traits
from millstream.backend.transcription.settings import Vocabulary
from millstream.backend.transcription.whisper.alignment import (
    POSITIONS_PER_SECOND,
    AlignedWord,
    aligned_words,
    alignment,
    split_words,
    warp,
)
from millstream.backend.transcription.whisper.cache import RowCache
from millstream.backend.transcription.whisper.model import Decoder, Encoder, KeysValues
from millstream.backend.transcription.whisper.row import Row, make_row, task_tokens
from millstream.backend.transcription.whisper.sampling import Draw, Sampler
from millstream.backend.transcription.whisper.spectrogram import LogMel
from millstream.backend.transcription.whisper.text import Attempt, Stretch, best_attempt, stretches
from millstream.backend.transcription.whisper.tokens import Allowed, SpecialTokens, allowed_next
from millstream.engine.transcription.messages import WindowSegment, WindowText, WordTime
from millstream.engine.transcription.plan import RowKey, TranscriptionResult, WindowStart
from millstream.models.transcription_layout import WhisperShape
from millstream.speech_types import SPEECH_RATE

HALF_FILLED = 0.8
"""The share of half a window that audio may fill: silence follows it in what models have learned from."""

_FREE = Allowed(True, True, (0, -1), False)
"""For slots without a row: something is computed there, and nobody looks at it."""


@dataclass(frozen=True, slots=True)
class WhisperParts:
    """A loaded model."""

    shape: WhisperShape
    encoder: Encoder
    decoder: Decoder
    mel: LogMel
    vocabulary: Vocabulary
    special: SpecialTokens
    sampler: Sampler
    heads: tuple[tuple[int, int], ...]
    """(layer, head) of the cross attention that follows the speech."""
    weights: list[mx.array]
    dtype: mx.Dtype


class Whisper:
    def __init__(self, parts: WhisperParts, traits: Traits) -> None:
        self._parts = parts
        self.traits = traits
        self._rows: dict[RowKey, Row] = {}
        self._cache = RowCache()
        self._found: list[tuple[int, str]] = []
        """Languages that were found since the last result."""

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self._parts.weights)

    @property
    def dtype(self) -> str:
        return str(self._parts.dtype).removeprefix("mlx.core.")

    def cache_bytes(self) -> int:
        return self._cache.nbytes

    def reset(self) -> None:
        self._rows.clear()
        self._found.clear()
        self._cache.clear()

    def drop(self, keys: Sequence[RowKey]) -> None:
        for key in keys:
            if (row := self._rows.pop(key, None)) is not None:
                self._cache.leave(row.slot)
        if keys:
            self._compact()

    def use_rows(self, *, start_windows: int) -> None:
        """Sets how many windows begin in one step, once that is known."""
        self.traits = replace(self.traits, start_windows=start_windows)

    def encode(self, windows: Sequence[WindowStart]) -> list[KeysValues]:
        """The keys and values of the audio in each layer of the decoder."""
        parts = self._parts
        mel = parts.mel([np.frombuffer(window.samples, np.float32) for window in windows]).astype(parts.dtype)
        half = [place for place, window in enumerate(windows) if self._reads_half(window)]
        if not half:
            return parts.decoder.cross(parts.encoder(mel))
        read_half = _twice(parts.decoder.cross(parts.encoder(mel[mx.array(half), : mel.shape[1] // 2])))
        if len(half) == len(windows):
            return read_half
        whole = [place for place in range(len(windows)) if place not in half]
        read_whole = parts.decoder.cross(parts.encoder(mel[mx.array(whole)]))
        order = mx.array(np.argsort([*whole, *half]))
        return [
            (mx.concatenate([keys, others])[order], mx.concatenate([values, more])[order])
            for (keys, values), (others, more) in zip(read_whole, read_half, strict=True)
        ]

    def _reads_half(self, window: WindowStart) -> bool:
        """True for short audio whose text is wanted soon. The encoder is most of the work, and takes half of the time
        or less for half a window. Whisper was trained on whole ones, so this is not for files: tiny.en read one word
        differently in two of eleven clips of 2 to 11 s, and capital letters in a third."""
        positions = self._parts.shape.audio_positions
        longest = HALF_FILLED * self._parts.shape.window_seconds / 2
        seconds = len(window.samples) / 4 / SPEECH_RATE
        return window.options.quick and positions % 2 == 0 and seconds <= longest

    def start(self, windows: Sequence[WindowStart]) -> None:
        parts = self._parts
        cross = self.encode(windows)
        languages = self._languages(windows, cross)
        rows = [
            make_row(window, language, parts.shape, parts.special, parts.vocabulary)
            for window, language in zip(windows, languages, strict=True)
        ]
        for length in sorted({len(row.prompt) for row in rows}):
            places = [place for place, row in enumerate(rows) if len(row.prompt) == length]
            self._prefill([rows[place] for place in places], _take(cross, places, len(rows)))

    def advance(self) -> TranscriptionResult:
        languages, self._found = tuple(self._found), []
        if not self._rows:
            return TranscriptionResult((), languages)
        self._step()
        done: list[WindowText] = []
        for row in list(self._rows.values()):
            if row.tokens[-1] != self._parts.special.end and len(row.tokens) < row.limit:
                continue
            if row.end_attempt(self._parts.vocabulary, self._parts.special):
                self._begin_again(row)
                continue
            done.append(self._finish(row))
            del self._rows[row.key]
            self._cache.leave(row.slot)
        if done:
            self._compact()
        return TranscriptionResult(tuple(done), languages)

    def _languages(self, windows: Sequence[WindowStart], cross: Sequence[KeysValues]) -> list[str | None]:
        known = self._parts.special.languages
        if not known:
            return ["en"] * len(windows)
        asked = [window.options.language for window in windows]
        places = [place for place, language in enumerate(asked) if language is None]
        if not places:
            return asked
        tokens = mx.full((len(places), 1), self._parts.special.start, mx.int32)
        hidden, _, _ = self._parts.decoder.prefill(tokens, _take(cross, places, len(windows)))
        logits = self._parts.decoder.logits(hidden[:, 0])[:, mx.array(list(known.values()))]
        codes = list(known)
        best: list[int] = logits.argmax(axis=-1).tolist()  # type: ignore[assignment]
        for place, choice in zip(places, best, strict=True):
            asked[place] = codes[choice]
            self._found.append((windows[place].request_id, codes[choice]))
        return asked

    def _prefill(self, rows: Sequence[Row], cross: list[KeysValues]) -> None:
        """Makes rows of windows whose prompts have the same length."""
        parts = self._parts
        tokens = mx.array([row.prompt for row in rows], mx.int32)
        hidden, own, _ = parts.decoder.prefill(tokens, cross)
        logits = parts.decoder.logits(hidden[:, rows[0].prompt.index(parts.special.start)])
        no_speech = mx.softmax(logits, axis=-1)[:, parts.special.no_speech]
        for place, row in enumerate(rows):
            row.slot = self._cache.join(_take(cross, [place], len(rows)), _before_last(own, place))
            self._rows[row.key] = row
        mx.eval(no_speech, *self._cache.arrays())
        for row, probability in zip(rows, no_speech.tolist(), strict=True):  # type: ignore[arg-type]
            row.no_speech = float(probability)  # type: ignore[arg-type]

    def _begin_again(self, row: Row) -> None:
        tokens = mx.array([row.prompt], mx.int32)
        _, own, _ = self._parts.decoder.prefill(tokens, self._cache.cross_of(row.slot))
        self._cache.rewind(row.slot, _before_last(own, 0))

    def _step(self) -> None:
        """One token for each row."""
        parts, cache = self._parts, self._cache
        by_slot = {row.slot: row for row in self._rows.values()}
        slots = [by_slot.get(slot) for slot in range(cache.slots)]
        cache.begin_step()
        inputs = mx.array([0 if row is None else row.next_input for row in slots], mx.int32)
        hidden = parts.decoder.step(inputs, mx.array(cache.lengths(), mx.int32), cache.cross, cache)
        cache.end_step()
        allowed = [_FREE if row is None else allowed_next(row.tokens, parts.special, row.last_time) for row in slots]
        draws = [Draw() if row is None else Draw(row.temperature, row.seed, len(row.tokens)) for row in slots]
        tokens, logprobs = parts.sampler(parts.decoder.logits(hidden), allowed, draws)
        mx.eval(tokens, logprobs)
        for row, token, logprob in zip(slots, np.asarray(tokens), np.asarray(logprobs), strict=True):
            if row is not None:
                row.tokens.append(int(token))
                row.logprobs.append(float(logprob))

    def _compact(self) -> None:
        if (stay := self._cache.compact()) is not None:
            moved = {slot: place for place, slot in enumerate(stay)}
            for row in self._rows.values():
                row.slot = moved[row.slot]

    def _finish(self, row: Row) -> WindowText:
        parts = self._parts
        attempt = best_attempt(row.attempts)
        found: list[Stretch] = []
        reached: float | None = None
        if not attempt.is_silence:
            found, reached = stretches(attempt.tokens, parts.special.first_time, parts.special.end, row.seconds)
            found = [
                each for each in found if each.start < row.seconds and parts.vocabulary.decode(each.tokens).strip()
            ]
        words = self._words(row, attempt, found) if row.options.words and found else []
        return WindowText(
            *row.key,
            segments=tuple(self._segments(found, words)),
            language=row.language,
            consumed=reached,
            prompt_tokens=len(row.prompt),
            completion_tokens=len(attempt.tokens),
            temperature=attempt.temperature,
            avg_logprob=attempt.logprob,
            compression_ratio=attempt.compression,
            no_speech_prob=row.no_speech,
        )

    def _segments(self, found: Sequence[Stretch], words: Sequence[AlignedWord]) -> list[WindowSegment]:
        """Deals out the words by the tokens that they have."""
        segments: list[WindowSegment] = []
        place = 0
        for stretch in found:
            own: list[WordTime] = []
            tokens = 0
            while place < len(words) and tokens < len(stretch.tokens):
                word = words[place]
                own.append(WordTime(word.text, round(word.start, 2), round(word.end, 2), word.probability))
                tokens += word.tokens
                place += 1
            text = self._parts.vocabulary.decode(stretch.tokens)
            segments.append(WindowSegment(stretch.start, stretch.end, text, stretch.tokens, tuple(own)))
        return segments

    def _words(self, row: Row, attempt: Attempt, found: Sequence[Stretch]) -> list[AlignedWord]:
        """Reads the text once more, to see where in the audio each of its tokens is."""
        parts = self._parts
        text = [token for stretch in found for token in stretch.tokens]
        task = task_tokens(parts.special, row.language, row.options)
        room = parts.shape.text_positions - len(task) - 2
        text = text[:room]
        tokens = mx.array([[*task, parts.special.no_timestamps, *text, parts.special.end]], mx.int32)
        _, _, matches = parts.decoder.prefill(tokens, self._cache.cross_of(row.slot), parts.heads)
        positions = max(1, min(parts.shape.audio_positions, round(row.seconds * POSITIONS_PER_SECOND)))
        matrix = np.asarray(alignment(matches, positions))[len(task) : -1]
        begins = (warp(-matrix) / POSITIONS_PER_SECOND).astype(np.float32)
        logprobs = row.attempt_logprobs[row.attempts.index(attempt)]
        of_text = [
            logprob for token, logprob in zip(attempt.tokens, logprobs, strict=False) if token < parts.special.end
        ]
        language = row.language if row.options.task == "transcribe" else "en"
        words: list[AlignedWord] = []
        place = 0
        for stretch in found:
            own = split_words(text[place : place + len(stretch.tokens)], parts.vocabulary, language)
            count = sum(number for _, number in own)
            words += aligned_words(own, begins[place : place + count + 1], of_text[place : place + count])
            place += count
        return words


def _take(cross: Sequence[KeysValues], places: Sequence[int], count: int) -> list[KeysValues]:
    if len(places) == count:
        return list(cross)
    if len(places) == 1:
        return [(keys[places[0] : places[0] + 1], values[places[0] : places[0] + 1]) for keys, values in cross]
    taken = mx.array(list(places))
    return [(keys[taken], values[taken]) for keys, values in cross]


def _twice(cross: Sequence[KeysValues]) -> list[KeysValues]:
    """The same positions again, up to a whole window: attention over them gives the same as over one of each."""
    return [(mx.concatenate([keys] * 2, axis=2), mx.concatenate([values] * 2, axis=2)) for keys, values in cross]


def _before_last(own: Sequence[KeysValues], row: int) -> list[KeysValues]:
    """Of one row, without its last token: that one is the input of the first step."""
    return [(keys[row : row + 1, :, :-1], values[row : row + 1, :, :-1]) for keys, values in own]
