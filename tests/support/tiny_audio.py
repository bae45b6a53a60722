"""Prompts with audio for tiny audio models: as submits for our engine, and run by mlx-vlm as the reference."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.engine.generation.messages import Generate
from millstream.media.port import Placeholder, PreparedMedia
from millstream.media.processors.base import ModelFiles
from millstream.media.processors.gemma_audio import Gemma4AudioProcessor
from millstream.media.prompt import locate_media
from millstream.types import Kind
from support.audio_files import tone
from support.tiny_vision import AUDIO, END, FAMILIES, IMAGE, START, WORDS, picture

PLACEHOLDERS: dict[Kind, Placeholder] = {"image": Placeholder("<image>", IMAGE), "audio": Placeholder("<audio>", AUDIO)}

Asked = int | float
"""Audio of so many seconds (float), or the image with this number (int)."""


class AudioCase:
    """A prompt with images and audio. `seed` chooses its words, `voice` its tones."""

    def __init__(
        self, family: str, seed: int, media: Sequence[Asked], *, words: int, count: int, voice: int = 0
    ) -> None:
        draw = random.Random(seed)
        self.count = count
        self.samples: list[np.ndarray] = []
        self.pictures: list[dict[str, np.ndarray]] = []
        self._prepared: list[PreparedMedia] = []
        self._processor = Gemma4AudioProcessor(ModelFiles(FAMILIES[family]), PLACEHOLDERS["audio"].text)
        tokens: list[int] = []
        for number, asked in enumerate(media):
            tokens += [draw.choice(WORDS) for _ in range(draw.randrange(words + 1))]
            tokens += [START, *self._add(family, asked, 100 * voice + number), END]
        tokens += [draw.choice(WORDS) for _ in range(1 + words)]
        self.prompt = tuple(tokens)
        self.media = locate_media(tokens, PLACEHOLDERS, self._prepared)

    def _add(self, family: str, asked: Asked, voice: int) -> list[int]:
        if isinstance(asked, int):
            arrays, tokens = picture(family, asked)
            self.pictures.append(arrays)
            self._prepared.append(PreparedMedia("image", arrays, "", len(tokens)))
            return tokens
        self.samples.append(tone(200 + 170 * voice, asked))
        self._prepared.append(self._processor.prepare(self.samples[-1]))
        return [AUDIO] * self._prepared[-1].feature_tokens

    def submit(self, number: int, count: int | None = None) -> Generate:
        contents = tuple((each.start, each.digest) for each in self.media)
        return Generate(number, self.prompt, count or self.count, contents=contents, media=self.media)


class OneByOne:
    """An audio tower that encodes each audio file separately and drops padding, as transformers does. mlx-vlm would put
    the padding of a short file where the tokens of a longer one belong."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower

    def __call__(self, features: Any, mask: Any) -> tuple[Any, Any]:
        import mlx.core as mx

        encoded = []
        for number in range(features.shape[0]):
            length = int((~mask[number]).sum().item())
            encoded.append(self._tower(features[number : number + 1, :length], mask[number : number + 1, :length])[0])
        return mx.concatenate(encoded, axis=1), None


def reference(model: Any, case: AudioCase) -> list[int]:
    """mlx-vlm's own extractor and generation, one request at a time."""
    import mlx.core as mx
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.models.gemma4.audio_feature_extractor import Gemma4AudioFeatureExtractor

    given: dict[str, Any] = {}
    if case.samples:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            extracted = Gemma4AudioFeatureExtractor()(case.samples)
        given = {name: mx.array(np.stack(arrays)) for name, arrays in extracted.items()}
    pixels = None
    if case.pictures:
        pixels = mx.array(np.concatenate([arrays["pixel_values"] for arrays in case.pictures]))
    tokens = mx.array([case.prompt])
    # Audio is not marked (as 3): mlx-vlm would cut the prompt, and image tokens would not attend to one another.
    kinds = (tokens == IMAGE).astype(mx.int32)
    mask = mx.ones(tokens.shape, dtype=mx.int32)
    steps = generate_step(
        tokens, model, pixels, mask, max_tokens=case.count, temperature=0.0, mm_token_type_ids=kinds, **given
    )
    return [int(token) for token, _ in steps]
