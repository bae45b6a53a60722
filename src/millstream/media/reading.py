"""A model's reader of images: from the bytes of a file to what the model takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream.media.images import open_image
from millstream.media.limits import MediaLimits
from millstream.media.port import Prepared
from millstream.media.processors.base import ImageProcessor
from millstream.media.processors.loading import load_processor


class ImageReader:
    """See `port.MediaReader`."""

    kinds = frozenset({"image"})

    def __init__(self, processor: ImageProcessor, limits: MediaLimits) -> None:
        self._processor = processor
        self._limits = limits
        self.marker = processor.marker
        self.token_id = processor.token_id

    def read(self, data: bytes) -> Prepared:
        return self._processor.prepare(open_image(data, self._limits))


def load_reader(folder: Path, token_bytes: Callable[[int], bytes], limits: MediaLimits) -> ImageReader | None:
    """None for a model that takes text only."""
    processor = load_processor(folder, token_bytes)
    return None if processor is None else ImageReader(processor, limits)
