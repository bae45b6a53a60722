"""Image processor of Pixtral and Mistral 3: native aspect ratio, with a break token after each row of patches."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from millstream.media.port import Placeholder, PreparedMedia
from millstream.media.processors.base import OPENAI_CLIP, ModelFiles, Normalizer, resampling_filter, resize

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


class PixtralProcessor:
    def __init__(self, files: ModelFiles, image_token: str) -> None:
        self.placeholder = Placeholder(image_token, files.token_id("image_token_index", "image_token_id"))
        settings = files.image
        self._normalize = Normalizer.read(settings, mean=OPENAI_CLIP[0], std=OPENAI_CLIP[1])
        self._resampling = resampling_filter(settings, Image.Resampling.BICUBIC)
        # Mistral 3 merges patches after the vision tower: one token per block of patches.
        self._block = int(files.vision["patch_size"]) * int(files.config.get("spatial_merge_size") or 1)
        size = settings.get("size") or {}
        longest = int(size.get("longest_edge") or files.vision.get("image_size") or 1024)
        self._max_height, self._max_width = int(size.get("height") or longest), int(size.get("width") or longest)

    def prepare(self, image: Image.Image) -> PreparedMedia:
        height, width = self._target_size(image.height, image.width)
        pixels = self._normalize(resize(image, height, width, self._resampling))[np.newaxis]
        rows, columns = height // self._block, width // self._block
        text = BREAK.join([self.placeholder.text * columns] * rows) + END
        sizes = np.array([[height, width]], np.int64)
        return PreparedMedia("image", {"pixel_values": pixels, "image_sizes": sizes}, text, rows * columns)

    def _target_size(self, height: int, width: int) -> tuple[int, int]:
        excess = max(height / self._max_height, width / self._max_width)
        if excess > 1:
            height, width = max(1, math.floor(height / excess)), max(1, math.floor(width / excess))
        return math.ceil(height / self._block) * self._block, math.ceil(width / self._block) * self._block
