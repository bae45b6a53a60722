"""Kyutai's Pocket TTS on the modules of mlx-audio: reads text, writes sound frame by frame. Owner only.

The library would download a voice that it does not find, and take a voice's name for a path or an address. Here voices
are files of the model's folder, read when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from millstream.backend import mlx_audio_import  # noqa: F401  before all that imports mlx-audio
from millstream.backend.device import Device
from millstream.backend.speech.library_pieces import only_piece, seed_of
from millstream.backend.speech.settings import SpeechSettings
from millstream.backend.speech.speaker import SpeakerTraits
from millstream.backend.weights.library import LibraryModel, fill, stored_weights
from millstream.backend.weights.materialize import reachable_arrays
from millstream.engine.speech.plan import PieceInput
from millstream.errors import ModelError
from millstream.models.checks import check_folder
from millstream.speech_types import Samples, Voice

DEFAULT_VOICES = ("default", "alba")
FRAMES = 4
"""Frames per step, of 80 ms each: so long a cancellation waits."""


def load_pocket_tts(settings: SpeechSettings, device: Device) -> PocketTtsSpeaker:
    from mlx_audio.tts.models.pocket_tts.pocket_tts import Model, ModelConfig

    folder = settings.path
    config = check_folder(folder)
    built = ModelConfig.from_dict({**config, "model_path": str(folder)})
    tokenizer = Path(built.flow_lm.lookup_table.tokenizer_path)
    if not tokenizer.is_file() or tokenizer.resolve().parent != folder.resolve():
        raise ModelError(f"{folder}: has no tokenizer.model or tokenizer.json")
    model = Model(built)
    fill(model, model.sanitize(stored_weights(folder)), config, folder)
    loaded = LibraryModel(model, device)
    prompts = {name: _prompt(model, path) for name, path in settings.layout.voices}
    return PocketTtsSpeaker(model, prompts, loaded.dtype, loaded.notes)


def _prompt(model: Any, path: Path) -> mx.array:
    """What the model reads of a voice before a text."""
    stored = mx.load(str(path))
    assert isinstance(stored, dict)
    if "speaker_wavs" in stored:
        latents = stored["speaker_wavs"]
        latents = latents if latents.ndim == 3 else latents[None]
        prompt: mx.array = latents.transpose(0, 2, 1).astype(mx.float32) @ model.speaker_proj_weight.T
    else:
        found = stored.get("emb", stored.get("audio_prompt"))
        if found is None:
            raise ModelError(f"{path}: has none of the tensors speaker_wavs, emb and audio_prompt, so it is no voice")
        prompt = found if found.ndim == 3 else found[None]
    if prompt.ndim != 3 or prompt.shape[0] != 1 or prompt.shape[2] != model.flow_lm.dim:
        raise ModelError(f"{path}: has the shape {prompt.shape}; it must be (1, frames, {model.flow_lm.dim})")
    return prompt


class PocketTtsSpeaker:
    """Implements `speaker.Speaker`. The codec's state is in the model, so one text is spoken at a time."""

    def __init__(self, model: Any, prompts: Mapping[str, mx.array], dtype: str, notes: tuple[str, ...]) -> None:
        self._model = model
        self._prompts = prompts
        names = sorted(prompts, key=lambda name: (name not in DEFAULT_VOICES, name != DEFAULT_VOICES[0], name))
        self.voices: Sequence[Voice] = [Voice(name) for name in names]
        self.sample_rate: int = model.sample_rate
        self.traits = SpeakerTraits(takes_speed=False, notes=notes)
        self.dtype = dtype
        self.batch_pieces = self.open_batches = 1

    @property
    def weights(self) -> Sequence[mx.array]:
        return [*reachable_arrays(self._model), *self._prompts.values()]

    def speak(self, pieces: Sequence[PieceInput]) -> Iterator[Sequence[Samples]]:
        piece, voice = only_piece(pieces, self.voices)
        mx.random.seed(seed_of(piece))
        state = self._model.init_state()
        prompt = self._prompts[voice]
        self._model._run_flow_lm(model_state=state, audio_conditioning=prompt)
        self._model._slice_flow_cache(state, prompt.shape[1])
        frames: list[mx.array] = []
        for frame in self._model.generate_audio_stream(state, piece.piece.text):
            frames.append(frame)
            if len(frames) == FRAMES:
                yield [np.asarray(mx.concatenate(frames).astype(mx.float32))]
                frames = []
        if frames:
            yield [np.asarray(mx.concatenate(frames).astype(mx.float32))]
