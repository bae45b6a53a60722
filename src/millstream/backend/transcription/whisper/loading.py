"""Loads Whisper from a folder. Owner only."""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np

from millstream.backend.device import Device, available_bytes
from millstream.backend.transcription.family import Traits
from millstream.backend.transcription.settings import TranscriptionSettings, Vocabulary
from millstream.backend.transcription.whisper.arithmetic import arithmetic_for
from millstream.backend.transcription.whisper.family import Whisper, WhisperParts
from millstream.backend.transcription.whisper.model import Decoder, Encoder
from millstream.backend.transcription.whisper.sampling import Sampler
from millstream.backend.transcription.whisper.spectrogram import LogMel
from millstream.backend.transcription.whisper.tokens import SpecialTokens
from millstream.backend.transcription.whisper.weights import Weights
from millstream.backend.weights.materialize import evaluate_all
from millstream.engine.protocols import Progress
from millstream.engine.transcription.messages import Options
from millstream.engine.transcription.plan import WindowStart
from millstream.errors import ModelError
from millstream.models.transcription_layout import WhisperShape, read_whisper
from millstream.models.whisper_files import whisper_tensors
from millstream.speech_types import SPEECH_RATE

MAX_ROWS = 16
ROWS_SHARE = 0.4
"""Of the memory that is free once the weights are there: what rows may take."""
STEP_SECONDS = 0.1
"""What beginning windows should take in one step, at most: so long do others wait for their next token."""
MAX_START = 8


def load_whisper(settings: TranscriptionSettings, device: Device, report: Progress) -> Whisper:
    if settings.vocabulary is None:
        raise ModelError("Whisper needs a tokenizer")
    shape = read_whisper(settings.path)
    whisper_tensors(settings.path)  # raises for a file that must not be opened
    weights = Weights.of(settings.path, mx.float32 if device.is_cpu else None)
    model = make_whisper(
        shape, weights, settings.vocabulary, device, report, max_rows=settings.max_rows, disabled=settings.disabled
    )
    if "calibration" not in settings.disabled:
        report(0.0, "warming up")
        model.use_rows(start_windows=_measure(model, shape))
    return model


def make_whisper(
    shape: WhisperShape,
    weights: Weights,
    vocabulary: Vocabulary,
    device: Device,
    report: Progress,
    *,
    max_rows: int | None = None,
    disabled: frozenset[str] = frozenset(),
) -> Whisper:
    special = SpecialTokens.of(shape, vocabulary)
    arithmetic = arithmetic_for(device, disabled)
    encoder, decoder = Encoder(shape, weights, arithmetic), Decoder(shape, weights, arithmetic)
    evaluate_all(weights.used, report)
    named = shape.alignment_heads or tuple(
        (row[0], row[1]) for row in weights.integers("alignment_heads") if len(row) == 2
    )
    # Without a list, heads of the upper half of the layers follow the speech best.
    heads = named or tuple(
        (layer, head) for layer in range(shape.text_layers // 2, shape.text_layers) for head in range(shape.text_heads)
    )
    mel = LogMel(shape.mels, 2 * shape.audio_positions)
    parts = WhisperParts(
        shape,
        encoder,
        decoder,
        mel,
        vocabulary,
        special,
        Sampler(
            shape.vocab,
            special,
            special.suppressed(shape, vocabulary),
            special.suppressed_first(shape, vocabulary),
            arithmetic,
        ),
        heads,
        [*weights.used, *mel.arrays],
        weights.dtype,
    )
    row_bytes = shape.row_values * weights.dtype.size
    rows = int(ROWS_SHARE * available_bytes(device) / row_bytes)
    traits = Traits(
        window_seconds=shape.window_seconds,
        languages=tuple(special.languages) or ("en",),
        detects_language=bool(special.languages),
        translates=bool(special.languages),
        word_times=True,
        takes_prompt=True,
        vocab_size=shape.vocab,
        row_bytes=row_bytes,
        max_rows=max(1, min(rows, max_rows or MAX_ROWS, MAX_ROWS)),
    )
    return Whisper(parts, traits)


def _measure(model: Whisper, shape: WhisperShape) -> int:
    """How many windows can begin in one step."""
    silence = np.zeros(int(SPEECH_RATE * shape.window_seconds), np.float32).tobytes()
    window = WindowStart(0, 0, silence, Options())
    seconds = 0.0
    for _ in range(2):  # the first one compiles kernels
        started = time.perf_counter()
        mx.eval(*(array for pair in model.encode([window]) for array in pair))
        seconds = time.perf_counter() - started
    return max(1, min(MAX_START, int(STEP_SECONDS / max(seconds, 1e-6))))
