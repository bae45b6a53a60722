"""Families that write the text of a window token by token, each row with a KV cache of its own.

Rows take turns within a step: one token each, evaluated together. What a row writes does not depend on the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from millstream.backend.transcription.family import Traits
from millstream.backend.weights.library import LibraryModel
from millstream.backend.weights.materialize import reachable_arrays
from millstream.engine.transcription.messages import WindowSegment, WindowText
from millstream.engine.transcription.plan import RowKey, TranscriptionResult, WindowStart
from millstream.speech_types import SPEECH_RATE, Samples

STEPS = 4
"""Tokens per row in one step of the engine: so many steps a cancellation waits."""


class Writer(Protocol):
    """A loaded model that writes text about audio."""

    @property
    def traits(self) -> Traits: ...

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text. They are not in it."""
        ...

    def begin(self, samples: Samples, window: WindowStart) -> tuple[Any, mx.array]:
        """A new KV cache that has read the audio and the prompt, and the logits of the first token."""
        ...

    def next(self, cache: Any, token: int) -> mx.array:
        """The logits after one more token, lazy."""
        ...

    def most_tokens(self, seconds: float) -> int:
        """A text of this much audio is not longer: what writes on has lost its way."""
        ...

    def read(self, tokens: Sequence[int]) -> tuple[str | None, str]:
        """The language, if the tokens name it, and the text."""
        ...


@dataclass(slots=True)
class _Row:
    window: WindowStart
    seconds: float
    cache: Any
    logits: mx.array
    key: mx.array | None
    """For sampling; None where the best token is taken."""
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    said_language: bool = False


class WrittenFamily:
    """A writer as a family of transcription models."""

    def __init__(self, writer: Writer, loaded: LibraryModel) -> None:
        self._writer = writer
        self._loaded = loaded
        self._rows: dict[RowKey, _Row] = {}

    @property
    def traits(self) -> Traits:
        return self._writer.traits

    @property
    def weight_bytes(self) -> int:
        return self._loaded.weight_bytes

    @property
    def dtype(self) -> str:
        return self._loaded.dtype

    def drop(self, keys: Sequence[RowKey]) -> None:
        for key in keys:
            self._rows.pop(key, None)

    def start(self, windows: Sequence[WindowStart]) -> None:
        for window in windows:
            samples = np.frombuffer(window.samples, np.float32)
            cache, logits = self._writer.begin(samples, window)
            sampled = window.options.temperatures[0] > 0
            key = mx.random.key(window.options.seed * 65_537 + window.index) if sampled else None
            self._rows[window.key] = _Row(window, len(samples) / SPEECH_RATE, cache, logits, key)

    def advance(self) -> TranscriptionResult:
        done: list[WindowText] = []
        languages: list[tuple[int, str]] = []
        for _ in range(STEPS):
            rows = list(self._rows.values())
            if not rows:
                break
            drawn = [_draw(row) for row in rows]
            mx.eval(drawn)
            for row, (token, logprob) in zip(rows, drawn, strict=True):
                if self._write(row, int(np.asarray(token)), float(np.asarray(logprob))):
                    del self._rows[row.window.key]
                    done.append(self._text(row))
            languages += self._languages(rows)
        return TranscriptionResult(tuple(done), tuple(languages))

    def cache_bytes(self) -> int:
        return sum(array.nbytes for row in self._rows.values() for array in reachable_arrays(row.cache))

    def reset(self) -> None:
        self._rows.clear()

    def _write(self, row: _Row, token: int, logprob: float) -> bool:
        """True if the row ends."""
        row.logprob += logprob
        if token in self._writer.ends:
            return True
        row.tokens.append(token)
        if len(row.tokens) >= self._writer.most_tokens(row.seconds):
            return True
        row.logits = self._writer.next(row.cache, token)
        return False

    def _languages(self, rows: Sequence[_Row]) -> list[tuple[int, str]]:
        """Those that rows have named since the last time."""
        if not self._writer.traits.detects_language:
            return []
        found = []
        for row in rows:
            if not row.said_language and row.window.options.language is None:
                language, _ = self._writer.read(row.tokens)
                if language is not None:
                    row.said_language = True
                    found.append((row.window.request_id, language))
        return found

    def _text(self, row: _Row) -> WindowText:
        language, text = self._writer.read(row.tokens)
        segment = WindowSegment(0.0, row.seconds, text, tuple(row.tokens))
        return WindowText(
            row.window.request_id,
            row.window.index,
            (segment,) if text.strip() else (),
            language=language or row.window.options.language,
            completion_tokens=len(row.tokens),
            temperature=row.window.options.temperatures[0],
            avg_logprob=row.logprob / (len(row.tokens) + 1),
        )


def _draw(row: _Row) -> tuple[mx.array, mx.array]:
    """The next token of a row and its log probability, lazy."""
    logits = row.logits.reshape(-1).astype(mx.float32)
    if row.key is None:
        token = mx.argmax(logits)
    else:
        row.key, now = mx.random.split(row.key)
        token = mx.random.categorical(logits / row.window.options.temperatures[0], key=now)
    return token, logits[token] - mx.logsumexp(logits)


def token_bound(seconds: float, per_second: float) -> int:
    return 8 + math.ceil(per_second * seconds)
