"""Pixtral and Mistral 3: the image's own proportions, with a token at the end of each row of patches."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from millstream.media.port import Prepared
from millstream.media.processors.base import CLIP, Finish, ModelFiles, filter_of, resized

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


class PixtralProcessor:
    def __init__(self, files: ModelFiles, name: str) -> None:
        self.marker = name
        self.token_id = files.id_of("image_token_index", "image_token_id")
        looks = files.looks
        self._finish = Finish.read(looks, mean=CLIP[0], std=CLIP[1])
        self._way = filter_of(looks, Image.Resampling.BICUBIC)
        # A Mistral 3 merges patches after the tower: a token stands for a block of them.
        self._block = int(files.vision["patch_size"]) * int(files.config.get("spatial_merge_size") or 1)
        size = looks.get("size") or {}
        longest = int(size.get("longest_edge") or files.vision.get("image_size") or 1024)
        self._longest = int(size.get("height") or longest), int(size.get("width") or longest)

    def prepare(self, image: Image.Image) -> Prepared:
        height, width = self._fitted(image.height, image.width)
        pixels = self._finish(resized(image, height, width, self._way))[np.newaxis]
        rows, columns = height // self._block, width // self._block
        text = BREAK.join([self.marker * columns] * rows) + END
        sizes = np.array([[height, width]], np.int64)
        return Prepared("image", {"pixel_values": pixels, "image_sizes": sizes}, text, rows * columns)

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        over = max(height / self._longest[0], width / self._longest[1])
        if over > 1:
            height, width = max(1, math.floor(height / over)), max(1, math.floor(width / over))
        return math.ceil(height / self._block) * self._block, math.ceil(width / self._block) * self._block
