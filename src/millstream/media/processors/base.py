"""Protocols of the media processors, the settings they read from a model folder, and their shared pixel operations."""

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
from millstream.media.port import Placeholder, PreparedMedia
from millstream.media.wav import Samples

Pixels = npt.NDArray[np.float32]
Settings = dict[str, Any]


class ImageProcessor(Protocol):
    @property
    def placeholder(self) -> Placeholder: ...

    def prepare(self, image: Image.Image) -> PreparedMedia: ...


class VideoProcessor(Protocol):
    @property
    def placeholder(self) -> Placeholder: ...

    @property
    def sampling(self) -> FrameSampling:
        """Which frames the model takes."""
        ...

    def prepare(self, video: Frames) -> PreparedMedia: ...


class AudioProcessor(Protocol):
    @property
    def placeholder(self) -> Placeholder: ...

    @property
    def rate(self) -> int:
        """Samples per second of its input."""
        ...

    @property
    def max_seconds(self) -> float:
        """The longest audio that it takes."""
        ...

    def prepare(self, samples: Samples) -> PreparedMedia: ...


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The media settings of a model folder."""

    config: Settings
    image: Settings = field(default_factory=dict)
    """Of the image processor."""
    tokenizer: Settings = field(default_factory=dict)
    """tokenizer_config.json, with the names of special tokens."""
    video: Settings = field(default_factory=dict)
    """Of the video processor, if the model has settings of its own for it."""
    audio: Settings = field(default_factory=dict)
    """Of the audio feature extractor, and how many tokens audio takes."""

    @classmethod
    def read(cls, folder: Path) -> ModelFiles:
        processor = _read(folder / "processor_config.json")
        image = _read(folder / "preprocessor_config.json") | _section(processor, "image_processor")
        video = _read(folder / "video_preprocessor_config.json")
        audio = {name: processor[name] for name in _AUDIO_LENGTHS if name in processor}
        audio |= _section(processor, "feature_extractor")
        return cls(_read(folder / "config.json"), image, _read(folder / "tokenizer_config.json"), video, audio)

    @property
    def vision(self) -> Settings:
        vision = self.config["vision_config"]
        assert isinstance(vision, dict)
        return vision

    def token_id(self, *names: str) -> int:
        """The value of the first of these keys that config.json has. Raises `ModelError` if it has none."""
        for name in names:
            if isinstance(value := self.config.get(name), int):
                return value
        raise ModelError(
            f"the model's config.json has none of {', '.join(names)}; one is needed to locate media in prompts"
        )


_AUDIO_LENGTHS = ("audio_seq_length", "audio_ms_per_token")


def _section(settings: Settings, name: str) -> Settings:
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
class Normalizer:
    """Rescales and normalizes 8-bit pixels, channels first: the last step of every image processor."""

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(
        cls, settings: Settings, *, mean: tuple[float, ...], std: tuple[float, ...], normalize: bool = True
    ) -> Normalizer:
        factor = float(settings.get("rescale_factor") or 1 / 255) if settings.get("do_rescale", True) else 1.0
        if not settings.get("do_normalize", normalize):
            return cls(factor, (0.0,) * 3, (1.0,) * 3)
        return cls(factor, tuple(settings.get("image_mean") or mean), tuple(settings.get("image_std") or std))

    def __call__(self, image: Image.Image) -> Pixels:
        pixels: Pixels = np.array(np.asarray(image).transpose(2, 0, 1), np.float32, order="C")
        mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (self.mean, self.std))
        pixels *= np.float32(self.factor)  # in place: the array may have tens of megabytes
        pixels -= mean
        pixels /= std
        return pixels


IMAGENET_STANDARD = ((0.5,) * 3, (0.5,) * 3)
"""Mean and standard deviation; most vision towers were trained with these."""
OPENAI_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))

MAX_INTERMEDIATE_PIXELS = 2**24
"""Of the image between the two passes of a resize."""


def resampling_filter(settings: Settings, default: Image.Resampling) -> Image.Resampling:
    return Image.Resampling(settings["resample"]) if isinstance(settings.get("resample"), int) else default


def resize(image: Image.Image, height: int, width: int, resampling: Image.Resampling) -> Image.Image:
    if width > image.width and width * image.height > MAX_INTERMEDIATE_PIXELS:
        # Pillow resizes horizontally first: widening every row before rows are dropped may take gigabytes.
        image = image.resize((image.width, height), resampling)
    return image if image.size == (width, height) else image.resize((width, height), resampling)
