"""Preprocesses media for one model: decodes a file within the limits and runs the model family's processor on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream.media.audio import audio_bytes, open_audio
from millstream.media.frames import frames_bytes, open_frames
from millstream.media.images import image_bytes, open_image
from millstream.media.limits import MediaLimits
from millstream.media.port import Placeholder, PreparedMedia
from millstream.media.processors.base import AudioProcessor, ImageProcessor, VideoProcessor
from millstream.media.processors.loading import load_processors
from millstream.types import Kind


class Preprocessor:
    """Implements `port.MediaPreprocessor`."""

    def __init__(
        self,
        images: ImageProcessor,
        videos: VideoProcessor | None,
        audio: AudioProcessor | None,
        limits: MediaLimits,
    ) -> None:
        self._images = images
        self._videos = videos
        self._audio = audio
        self._limits = limits
        self.placeholders: dict[Kind, Placeholder] = {"image": images.placeholder}
        if videos is not None:
            self.placeholders["video"] = videos.placeholder
        if audio is not None:
            self.placeholders["audio"] = audio.placeholder

    def decoding_bytes(self, kind: Kind, data: bytes) -> int:
        if kind == "video":
            return frames_bytes(data, self._limits)
        return audio_bytes(data, self._limits) if kind == "audio" else image_bytes(data, self._limits)

    def preprocess(self, kind: Kind, data: bytes) -> PreparedMedia:
        if kind == "video" and self._videos is not None:
            return self._videos.prepare(open_frames(data, self._limits, self._videos.sampling))
        if kind == "audio" and (audio := self._audio) is not None:
            return audio.prepare(open_audio(data, self._limits, rate=audio.rate, max_seconds=audio.max_seconds))
        return self._images.prepare(open_image(data, self._limits))


def load_preprocessor(folder: Path, token_bytes: Callable[[int], bytes], limits: MediaLimits) -> Preprocessor | None:
    """Reads the settings in a model's folder. Returns None if the model takes text only."""
    processors = load_processors(folder, token_bytes)
    return None if processors is None else Preprocessor(*processors, limits)
