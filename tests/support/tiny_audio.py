"""Prompts with sounds for tiny models that hear, as our engine takes them and as mlx-vlm does."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.engine.generation.messages import Generate
from millstream.media.port import Mark, Prepared
from millstream.media.processors.base import ModelFiles
from millstream.media.processors.gemma_audio import Gemma4SoundProcessor
from millstream.media.prompt import placed
from millstream.types import Kind
from support.audio_files import tone
from support.tiny_vision import END, FAMILIES, IMAGE, SOUND, START, WORDS, picture

MARKS: dict[Kind, Mark] = {"image": Mark("<image>", IMAGE), "audio": Mark("<sound>", SOUND)}

Asked = int | float
"""A sound of so many seconds, or the image with this number."""


class HeardCase:
    """A prompt with images and sounds. `seed`: its words; `voice`: what its sounds sound like."""

    def __init__(
        self, family: str, seed: int, media: Sequence[Asked], *, words: int, count: int, voice: int = 0
    ) -> None:
        draw = random.Random(seed)
        self.count = count
        self.samples: list[np.ndarray] = []
        self.pictures: list[dict[str, np.ndarray]] = []
        self._prepared: list[Prepared] = []
        self._ear = Gemma4SoundProcessor(ModelFiles(FAMILIES[family]), MARKS["audio"].text)
        tokens: list[int] = []
        for number, asked in enumerate(media):
            tokens += [draw.choice(WORDS) for _ in range(draw.randrange(words + 1))]
            tokens += [START, *self._add(family, asked, 100 * voice + number), END]
        tokens += [draw.choice(WORDS) for _ in range(1 + words)]
        self.prompt = tuple(tokens)
        self.media = placed(tokens, MARKS, self._prepared)

    def _add(self, family: str, asked: Asked, voice: int) -> list[int]:
        if isinstance(asked, int):
            arrays, tokens = picture(family, asked)
            self.pictures.append(arrays)
            self._prepared.append(Prepared("image", arrays, "", len(tokens)))
            return tokens
        self.samples.append(tone(200 + 170 * voice, asked))
        self._prepared.append(self._ear.prepare(self.samples[-1]))
        return [SOUND] * self._prepared[-1].places

    def submit(self, number: int, count: int | None = None) -> Generate:
        contents = tuple((each.start, each.digest) for each in self.media)
        return Generate(number, self.prompt, count or self.count, contents=contents, media=self.media)


class OneByOne:
    """An audio tower that hears each sound alone and leaves out what is only padding, as transformers does. mlx-vlm
    puts the padding of a short sound where a longer one's tokens are."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower

    def __call__(self, features: Any, mask: Any) -> tuple[Any, Any]:
        import mlx.core as mx

        heard = []
        for number in range(features.shape[0]):
            length = int((~mask[number]).sum().item())
            heard.append(self._tower(features[number : number + 1, :length], mask[number : number + 1, :length])[0])
        return mx.concatenate(heard, axis=1), None


def reference(model: Any, case: HeardCase) -> list[int]:
    """mlx-vlm's own extractor and generation, one request at a time."""
    import mlx.core as mx
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.models.gemma4.audio_feature_extractor import Gemma4AudioFeatureExtractor

    given: dict[str, Any] = {}
    if case.samples:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            heard = Gemma4AudioFeatureExtractor()(case.samples)
        given = {name: mx.array(np.stack(arrays)) for name, arrays in heard.items()}
    pixels = None
    if case.pictures:
        pixels = mx.array(np.concatenate([arrays["pixel_values"] for arrays in case.pictures]))
    tokens = mx.array([case.prompt])
    # Sounds are not marked (as 3): mlx-vlm would cut the prompt, and tokens of an image would not see each other.
    kinds = (tokens == IMAGE).astype(mx.int32)
    mask = mx.ones(tokens.shape, dtype=mx.int32)
    steps = generate_step(
        tokens, model, pixels, mask, max_tokens=case.count, temperature=0.0, mm_token_type_ids=kinds, **given
    )
    return [int(token) for token, _ in steps]
