"""A model's reader of media: from the bytes of a file to what the model takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream.media.audio import open_sound, sound_bytes
from millstream.media.frames import frames_bytes, open_frames
from millstream.media.images import image_bytes, open_image
from millstream.media.limits import MediaLimits
from millstream.media.port import Mark, Prepared
from millstream.media.processors.base import ImageProcessor, SoundProcessor, VideoProcessor
from millstream.media.processors.loading import load_processors
from millstream.types import Kind


class Reader:
    """See `port.MediaReader`."""

    def __init__(
        self,
        images: ImageProcessor,
        videos: VideoProcessor | None,
        sounds: SoundProcessor | None,
        limits: MediaLimits,
    ) -> None:
        self._images = images
        self._videos = videos
        self._sounds = sounds
        self._limits = limits
        self.marks: dict[Kind, Mark] = {"image": Mark(images.marker, images.token_id)}
        if videos is not None:
            self.marks["video"] = videos.mark
        if sounds is not None:
            self.marks["audio"] = sounds.mark

    def decoding_bytes(self, kind: Kind, data: bytes) -> int:
        if kind == "video":
            return frames_bytes(data, self._limits)
        return sound_bytes(data, self._limits) if kind == "audio" else image_bytes(data, self._limits)

    def read(self, kind: Kind, data: bytes) -> Prepared:
        if kind == "video" and self._videos is not None:
            return self._videos.prepare(open_frames(data, self._limits, self._videos.pace))
        if kind == "audio" and (sounds := self._sounds) is not None:
            return sounds.prepare(open_sound(data, self._limits, rate=sounds.rate, most=sounds.seconds))
        return self._images.prepare(open_image(data, self._limits))


def load_preprocessor(folder: Path, token_bytes: Callable[[int], bytes], limits: MediaLimits) -> Reader | None:
    """None for a model that takes text only."""
    found = load_processors(folder, token_bytes)
    return None if found is None else Reader(*found, limits)
