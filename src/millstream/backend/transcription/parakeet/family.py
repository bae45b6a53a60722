"""Parakeet as a family of transcription models: windows are encoded in one batch and decoded row by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from millstream.backend import mlx_audio_import  # noqa: F401  before all that imports mlx-audio
from millstream.backend.device import Device
from millstream.backend.transcription.family import Traits
from millstream.backend.transcription.parakeet.transducer import Emitted, Row, Transducer
from millstream.backend.transcription.parakeet.words import TimedToken, is_control, sentences
from millstream.backend.transcription.spectrograms import NemoSpectrogram
from millstream.backend.weights.library import LibraryModel, fill, stored_weights
from millstream.engine.protocols import Progress, ignore_progress
from millstream.engine.transcription.messages import WindowText
from millstream.engine.transcription.plan import RowKey, TranscriptionResult, WindowStart
from millstream.errors import ModelError
from millstream.models.transcription_rows import WINDOW_SECONDS
from millstream.speech_types import SPEECH_RATE

START_WINDOWS = 4
STEPS = 32
"""Tokens and blanks per row in one step of the engine: each costs little beside a window's encoder."""


def load_parakeet(
    folder: Path, config: dict[str, Any], device: Device, report: Progress = ignore_progress
) -> ParakeetFamily:

    # The library masks padding in batches if this is set. Windows that are alone have none.
    encoder = {**config["encoder"], "mask_padding": True}
    from mlx_audio.stt.models.parakeet.parakeet import Model, ModelConfig

    model = Model(ModelConfig.from_dict({**config, "encoder": encoder}))
    fill(model, stored_weights(folder), config, folder)
    return ParakeetFamily(model, LibraryModel(model, device, report))


class ParakeetFamily:
    def __init__(self, model: Any, loaded: LibraryModel) -> None:
        sizes = model.preprocessor_config
        if sizes.sample_rate != SPEECH_RATE:
            raise ModelError(f"it takes {sizes.sample_rate} samples per second; {SPEECH_RATE} are supported")
        self._model = model
        self._loaded = loaded
        self._spectrogram = NemoSpectrogram(
            bands=sizes.features,
            n_fft=sizes.n_fft,
            window=sizes.win_length,
            hop=sizes.hop_length,
            preemphasis=sizes.preemph,
            floor=sizes.log_zero_guard_value,
            per_band=sizes.normalize == "per_feature",
        )
        self._vocabulary: list[str] = list(model.vocabulary)
        self._frame_seconds = model.encoder_config.subsampling_factor * sizes.hop_length / SPEECH_RATE
        self._transducer: Transducer | None = None
        if hasattr(model, "joint"):
            durations = getattr(model, "durations", ())
            self._transducer = Transducer(model, len(self._vocabulary), durations, model.max_symbols)
        self._rows: dict[RowKey, tuple[WindowStart, Row]] = {}
        self._done: list[WindowText] = []
        """Texts of windows that need no steps: those of CTC models."""

    @property
    def traits(self) -> Traits:
        # The encoder takes longer windows, but its attention grows with the square, and others wait for a window.
        return Traits(WINDOW_SECONDS, word_times=True, start_windows=START_WINDOWS, notes=self._loaded.notes)

    @property
    def weight_bytes(self) -> int:
        return self._loaded.weight_bytes

    @property
    def dtype(self) -> str:
        return self._loaded.dtype

    def drop(self, keys: Sequence[RowKey]) -> None:
        for key in keys:
            self._rows.pop(key, None)
        self._free_others()

    def start(self, windows: Sequence[WindowStart]) -> None:
        audio = [np.frombuffer(window.samples, np.float32) for window in windows]
        features, frames = self._encode([self._spectrogram(samples) for samples in audio])
        if self._transducer is None:
            logprobs = self._model.decoder(features).astype(mx.float32)
            for number, (window, length) in enumerate(zip(windows, frames, strict=True)):
                self._done.append(self._text(window, _collapse(np.asarray(logprobs[number, :length]))))
            return
        for number, (window, length) in enumerate(zip(windows, frames, strict=True)):
            self._rows[window.key] = (window, self._transducer.add(features[number, :length], length))
        mx.eval([row.features for _, row in self._rows.values()])

    def advance(self) -> TranscriptionResult:
        done, self._done = self._done, []
        for _ in range(STEPS):
            ended = [key for key, (_, row) in self._rows.items() if row.ended]
            done += [self._text(window, row.emitted) for window, row in map(self._rows.pop, ended)]
            self._free_others()
            if not self._rows or self._transducer is None:
                break
            self._transducer.step()
        return TranscriptionResult(tuple(done))

    def cache_bytes(self) -> int:
        return 0 if self._transducer is None else self._transducer.nbytes

    def reset(self) -> None:
        self._rows.clear()
        self._done.clear()
        self._free_others()

    def _free_others(self) -> None:
        if self._transducer is not None:
            self._transducer.keep([row for _, row in self._rows.values()])

    def _encode(self, spectrograms: Sequence[np.ndarray[Any, Any]]) -> tuple[mx.array, list[int]]:
        """The encoder's output, padded, and how many frames of it each window has."""
        longest = max(map(len, spectrograms))
        padded = np.stack([np.pad(each, ((0, longest - len(each)), (0, 0))) for each in spectrograms])
        lengths = mx.array([len(each) for each in spectrograms])
        dtype = self._model.encoder.layers[0].norm_out.weight.dtype
        features, frames = self._model.encoder(mx.array(padded).astype(dtype), lengths)
        return features, frames.tolist()

    def _text(self, window: WindowStart, emitted: Sequence[Emitted]) -> WindowText:
        seconds = len(window.samples) // 4 / SPEECH_RATE
        tokens = []
        for each in emitted:
            if is_control(piece := self._vocabulary[each.token]):
                continue
            start = min(each.frame * self._frame_seconds, seconds)
            end = min((each.frame + max(each.frames, 1)) * self._frame_seconds, seconds)
            tokens.append(TimedToken(each.token, piece, start, end, each.logprob))
        return WindowText(
            window.request_id,
            window.index,
            sentences(tokens, words=window.options.words),
            completion_tokens=len(tokens),
            avg_logprob=sum(token.logprob for token in tokens) / max(len(tokens), 1),
        )


def _collapse(logprobs: np.ndarray[Any, Any]) -> list[Emitted]:
    """CTC: the best token of each frame; repeated ones are one token, and blanks, the last of the vocabulary, none."""
    blank = logprobs.shape[1] - 1
    found: list[Emitted] = []
    before = blank
    for frame, token in enumerate(logprobs.argmax(1).tolist()):
        if token != before and token != blank:
            found.append(Emitted(token, frame, 1, float(logprobs[frame, token])))
        elif token != blank:
            found[-1].frames += 1
        before = token
    return found
