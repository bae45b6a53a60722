"""Gemma 3: one square size. Gemma 4: the image's own proportions within a budget of tokens."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from millstream.errors import MediaRefused
from millstream.media.port import Prepared
from millstream.media.processors.base import HALVES, Finish, ModelFiles, filter_of, resized


class Gemma3Processor:
    """Pan and scan, which cuts long images into several, is off as in the published settings."""

    def __init__(self, files: ModelFiles, name: str) -> None:
        self.token_id = files.id_of("image_token_index", "image_token_id")
        self.marker = str(files.words.get("boi_token") or "<start_of_image>")
        end = str(files.words.get("eoi_token") or "<end_of_image>")
        self._places = int(files.config.get("mm_tokens_per_image") or 256)
        self._text = f"\n\n{self.marker}{name * self._places}{end}\n\n"
        self._side = int(files.vision["image_size"])
        self._finish = Finish.read(files.looks, mean=HALVES[0], std=HALVES[1])
        self._way = filter_of(files.looks, Image.Resampling.BILINEAR)

    def prepare(self, image: Image.Image) -> Prepared:
        pixels = self._finish(resized(image, self._side, self._side, self._way))[np.newaxis]
        return Prepared("image", {"pixel_values": pixels}, self._text, self._places)


class Gemma4Processor:
    def __init__(self, files: ModelFiles, name: str) -> None:
        self.marker = name
        self.token_id = files.id_of("image_token_id", "image_token_index")
        self._begin = str(files.words.get("boi_token") or "<|image>")
        self._end = str(files.words.get("eoi_token") or "<image|>")
        looks, vision = files.looks, files.vision
        self._finish = Finish.read(looks, mean=HALVES[0], std=HALVES[1], normalize=False)
        self._patch = int(looks.get("patch_size") or vision.get("patch_size") or 16)
        self._pool = int(looks.get("pooling_kernel_size") or vision.get("pooling_kernel_size") or 3)
        self._most = int(looks.get("max_soft_tokens") or vision.get("default_output_length") or 280)

    def prepare(self, image: Image.Image) -> Prepared:
        height, width = self._fitted(image.height, image.width)
        pixels = self._finish(resized(image, height, width, Image.Resampling.BICUBIC))[np.newaxis]
        places = (height // self._patch) * (width // self._patch) // self._pool**2
        return Prepared("image", {"pixel_values": pixels}, f"{self._begin}{self.marker * places}{self._end}", places)

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """The largest size in these proportions whose sides are whole pools of patches and whose tokens fit."""
        unit = self._pool * self._patch
        scale = math.sqrt(self._most * unit * unit / (height * width))
        high, wide = (math.floor(scale * side / unit) * unit for side in (height, width))
        if not high and not wide:
            raise MediaRefused(f"an image of {width} x {height} pixels cannot be fitted to this model")
        if not high:
            return unit, min(width // height, self._most) * unit
        if not wide:
            return min(height // width, self._most) * unit, unit
        return high, wide
