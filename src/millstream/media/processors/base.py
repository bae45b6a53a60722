"""What every family's image processor gives, and the work on pixels that they share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from millstream.errors import ModelError
from millstream.media.frame_sampling import FrameSampling
from millstream.media.frames import Frames
from millstream.media.port import Mark, Prepared
from millstream.media.wav import Samples

Pixels = npt.NDArray[np.float32]
Settings = dict[str, Any]


class ImageProcessor(Protocol):
    @property
    def marker(self) -> str:
        """What the template writes for an image."""
        ...

    @property
    def token_id(self) -> int:
        """The token that features stand at."""
        ...

    def prepare(self, image: Image.Image) -> Prepared: ...


class VideoProcessor(Protocol):
    @property
    def mark(self) -> Mark: ...

    @property
    def pace(self) -> FrameSampling:
        """Which frames the model is to see."""
        ...

    def prepare(self, video: Frames) -> Prepared: ...


class SoundProcessor(Protocol):
    @property
    def mark(self) -> Mark: ...

    @property
    def rate(self) -> int:
        """Samples a second that it takes."""
        ...

    @property
    def seconds(self) -> float:
        """The longest sound that it takes."""
        ...

    def prepare(self, samples: Samples) -> Prepared: ...


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model's folder says about images and other media."""

    config: Settings
    looks: Settings = field(default_factory=dict)
    """The image processor's settings."""
    words: Settings = field(default_factory=dict)
    """The tokenizer's settings, with the names of special tokens."""
    video_looks: Settings = field(default_factory=dict)
    """The video processor's settings, where it has its own."""
    sounds: Settings = field(default_factory=dict)
    """The settings of what is made of sounds, and how many tokens they take."""

    @classmethod
    def read(cls, folder: Path) -> ModelFiles:
        whole = _read(folder / "processor_config.json")
        looks = _read(folder / "preprocessor_config.json") | _inside(whole, "image_processor")
        videos = _read(folder / "video_preprocessor_config.json")
        sounds = {name: whole[name] for name in _SOUND_LENGTHS if name in whole} | _inside(whole, "feature_extractor")
        return cls(_read(folder / "config.json"), looks, _read(folder / "tokenizer_config.json"), videos, sounds)

    @property
    def vision(self) -> Settings:
        vision = self.config["vision_config"]
        assert isinstance(vision, dict)
        return vision

    def id_of(self, *names: str) -> int:
        """The first of these that the configuration has."""
        for name in names:
            if isinstance(value := self.config.get(name), int):
                return value
        raise ModelError(f"the model's config.json has none of {', '.join(names)}: media cannot be placed")


_SOUND_LENGTHS = ("audio_seq_length", "audio_ms_per_token")


def _inside(settings: Settings, name: str) -> Settings:
    value = settings.get(name)
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> Settings:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class Finish:
    """The last step of all processors: from 8-bit pixels to numbers around zero, channels first."""

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(
        cls, looks: Settings, *, mean: tuple[float, ...], std: tuple[float, ...], normalize: bool = True
    ) -> Finish:
        factor = float(looks.get("rescale_factor") or 1 / 255) if looks.get("do_rescale", True) else 1.0
        if not looks.get("do_normalize", normalize):
            return cls(factor, (0.0,) * 3, (1.0,) * 3)
        return cls(factor, tuple(looks.get("image_mean") or mean), tuple(looks.get("image_std") or std))

    def __call__(self, image: Image.Image) -> Pixels:
        pixels: Pixels = np.array(np.asarray(image).transpose(2, 0, 1), np.float32, order="C")
        mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (self.mean, self.std))
        pixels *= np.float32(self.factor)  # in place: an image of a model may have tens of megabytes
        pixels -= mean
        pixels /= std
        return pixels


HALVES = ((0.5,) * 3, (0.5,) * 3)
"""Mean and deviation that most towers were trained with."""
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


LARGE = 2**24
"""Pixels of an image on its way from one size to another."""


def filter_of(looks: Settings, default: Image.Resampling) -> Image.Resampling:
    return Image.Resampling(looks["resample"]) if isinstance(looks.get("resample"), int) else default


def resized(image: Image.Image, height: int, width: int, way: Image.Resampling) -> Image.Image:
    if width > image.width and width * image.height > LARGE:
        # Pillow stretches lines first, all of them, and then squeezes columns. That may take gigabytes on the way.
        image = image.resize((image.width, height), way)
    return image if image.size == (width, height) else image.resize((width, height), way)
