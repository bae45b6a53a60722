"""The whole of Kokoro: tokens and styles in, samples out. Owner only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from millstream.backend.speech.kokoro.decoder import Decoder
from millstream.backend.speech.kokoro.prosody import Albert, Prosody, TextEncoder
from millstream.backend.speech.kokoro.rows import Rows
from millstream.backend.speech.kokoro.tensors import Tensors
from millstream.models.kokoro_config import KokoroConfig
from millstream.speech_types import Samples


class Kokoro:
    def __init__(self, stored: Mapping[str, mx.array], config: KokoroConfig, dtype: mx.Dtype) -> None:
        tensors = Tensors(stored, dtype)
        self._style = config.style
        self._dtype = dtype
        self._albert = Albert(tensors, config)
        self._text = TextEncoder(tensors, config)
        self._prosody = Prosody(tensors, config)
        self._decoder = Decoder(tensors, config)
        self.vocab_size = min(self._albert.vocab_size, self._text.vocab_size)
        self.weights: Sequence[mx.array] = tensors.used

    def __call__(
        self, tokens: Sequence[NDArray[np.int32]], styles: mx.array, speeds: Sequence[float], *, noise: bool = True
    ) -> list[Samples]:
        """`tokens`: those of each piece, with a 0 at both ends. `styles`: (pieces, 2 * style). Computes as it is
        called."""
        rows = Rows(tuple(len(each) for each in tokens))
        padded = np.zeros((len(tokens), rows.longest), np.int32)
        for row, each in enumerate(tokens):
            padded[row, : len(each)] = each
        ids = mx.array(padded)
        styles = styles.astype(self._dtype)
        of_sound, of_prosody = styles[:, : self._style], styles[:, self._style :]
        encoded = self._prosody.encode(self._albert(ids, rows), of_prosody, rows)
        places, frames = _places(np.asarray(self._prosody.durations(encoded, rows)), rows, speeds)
        at = mx.array(places)[..., None]
        pitch, energy, _ = self._prosody.curves(
            frames.mask(mx.take_along_axis(encoded, at, axis=1)), of_prosody, frames
        )
        text = frames.mask(mx.take_along_axis(self._text(ids, rows), at, axis=1))
        sound, ends = self._decoder(text, pitch, energy, of_sound, frames, noise=noise)
        computed = np.asarray(sound)
        return [np.ascontiguousarray(computed[row, :length]) for row, length in enumerate(ends.lengths)]


def _places(durations: NDArray[np.float32], rows: Rows, speeds: Sequence[float]) -> tuple[NDArray[np.int32], Rows]:
    """The phoneme that each frame speaks, and the rows of frames."""
    spoken = []
    for row, (length, speed) in enumerate(zip(rows.lengths, speeds, strict=True)):
        counts = np.maximum(np.rint(durations[row, :length] / speed), 1).astype(np.int32)
        spoken.append(np.repeat(np.arange(length, dtype=np.int32), counts))
    frames = Rows(tuple(len(each) for each in spoken))
    places = np.zeros((len(spoken), frames.longest), np.int32)
    for row, each in enumerate(spoken):
        places[row, : len(each)] = each
    return places, frames
