"""Kokoro as a speaker: its weights and voices, from the folders in which they are published. Owner only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from millstream.backend.device import Device
from millstream.backend.speech.kokoro.network import Kokoro
from millstream.backend.speech.settings import SpeechSettings
from millstream.backend.speech.speaker import SpeakerTraits
from millstream.engine.speech.messages import VoiceMix
from millstream.engine.speech.plan import PieceInput
from millstream.errors import ModelError
from millstream.models.kokoro_config import SAMPLE_RATE, KokoroConfig, read_kokoro_config, torch_weights
from millstream.models.kokoro_voices import DEFAULT_VOICE, voice_of
from millstream.models.safetensors_header import folder_tensors, weight_files
from millstream.models.torch_file import TorchFile
from millstream.speech_types import Samples, Voice

GPU_PIECES = 8
"""Pieces of a batch on a GPU, which one does not fill. A CPU is filled by one: there, a batch would only be later."""


class KokoroSpeaker:
    """Implements `speaker.Speaker`. A sentence is computed as a whole: the norms of the vocoder need all of it."""

    def __init__(
        self, network: Kokoro, config: KokoroConfig, voices: Mapping[str, Samples], dtype: str, batch_pieces: int
    ) -> None:
        """`voices`: for each name a style for each number of phonemes, (numbers, styles)."""
        self._network = network
        self._config = config
        self._tables = voices
        self.sample_rate = SAMPLE_RATE
        names = sorted(voices, key=lambda name: (name != DEFAULT_VOICE, name))
        self.voices: Sequence[Voice] = [voice_of(name) for name in names]
        self.traits = SpeakerTraits(vocab_size=network.vocab_size)
        self.dtype = dtype
        self.batch_pieces = batch_pieces
        self.open_batches = 1

    @property
    def weights(self) -> Sequence[mx.array]:
        return self._network.weights

    def speak(self, pieces: Sequence[PieceInput]) -> Iterator[Sequence[Samples]]:
        tokens = [np.frombuffer(each.piece.tokens, np.int32) for each in pieces]
        for each in tokens:
            if len(each) > self._config.max_phonemes or np.any((each < 0) | (each >= self._network.vocab_size)):
                raise ModelError("a piece has too many phonemes, or phonemes that the model does not know")
        styles = np.stack([self._style(each.voice, len(row)) for each, row in zip(pieces, tokens, strict=True)])
        framed = [np.concatenate([[0], row, [0]]).astype(np.int32) for row in tokens]
        yield self._network(framed, mx.array(styles), [each.speed for each in pieces])

    def _style(self, mix: VoiceMix, phonemes: int) -> Samples:
        """The style of a mix of voices for a piece of so many phonemes."""
        shares = mix or ((self.voices[0].name, 1.0),)
        total = sum(share for _, share in shares)
        style = np.zeros(2 * self._config.style, np.float32)
        for name, share in shares:
            if name not in self._tables:
                raise ModelError(f"there is no voice {name!r}")
            table = self._tables[name]
            style += table[min(max(phonemes - 1, 0), len(table) - 1)] * np.float32(share / total)
        return style


def load_kokoro(settings: SpeechSettings, device: Device) -> KokoroSpeaker:
    config = read_kokoro_config(settings.path)
    stored = _weights(settings.path)
    if any(name.endswith(".scales") for name in stored):
        raise ModelError(f"{settings.path}: quantised weights of Kokoro are not supported; use those in bfloat16")
    dtype = mx.float32 if device.is_cpu else _float_type(stored)
    voices = {name: _voice(path, config) for name, path in settings.layout.voices}
    network = Kokoro(stored, config, dtype)
    pieces = 1 if device.is_cpu else GPU_PIECES
    return KokoroSpeaker(network, config, voices, str(dtype).removeprefix("mlx.core."), pieces)


def _weights(folder: Path) -> dict[str, mx.array]:
    path = torch_weights(folder)
    if path is not None:
        # Each part of the original was trained on several devices: its names have a `module.` more.
        return {name.replace(".module.", ".", 1): mx.array(values) for name, values in TorchFile(path).read()}
    folder_tensors(folder)  # raises for a file that must not be opened
    tensors: dict[str, mx.array] = {}
    for file in weight_files(folder):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        tensors |= loaded
    return tensors


def _voice(path: Path, config: KokoroConfig) -> Samples:
    if path.suffix == ".pt":
        values = [array for _, array in TorchFile(path).read()]
    else:
        loaded = mx.load(str(path))
        assert isinstance(loaded, dict)
        values = [np.array(array.astype(mx.float32)) for array in loaded.values()]
    width = 2 * config.style
    if len(values) != 1 or values[0].size == 0 or values[0].size % width:
        raise ModelError(f"{path}: a voice has one tensor with {width} numbers for each number of phonemes")
    return np.ascontiguousarray(values[0].reshape(-1, width), np.float32)


def _float_type(tensors: Mapping[str, mx.array]) -> mx.Dtype:
    """The type of most weights."""
    sizes: dict[mx.Dtype, int] = {}
    for tensor in tensors.values():
        if mx.issubdtype(tensor.dtype, mx.floating):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else mx.float32
