"""Image processors of Gemma 3 (one fixed square size) and Gemma 4 (native aspect ratio within a token budget)."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from millstream.errors import MediaRefused
from millstream.media.port import Placeholder, PreparedMedia
from millstream.media.processors.base import IMAGENET_STANDARD, ModelFiles, Normalizer, resampling_filter, resize


class Gemma3Processor:
    """Pan and scan, which crops long images into several, is off, as in the published settings."""

    def __init__(self, files: ModelFiles, image_token: str) -> None:
        begin = str(files.tokenizer.get("boi_token") or "<start_of_image>")
        end = str(files.tokenizer.get("eoi_token") or "<end_of_image>")
        self.placeholder = Placeholder(begin, files.token_id("image_token_index", "image_token_id"))
        self._tokens = int(files.config.get("mm_tokens_per_image") or 256)
        self._text = f"\n\n{begin}{image_token * self._tokens}{end}\n\n"
        self._side = int(files.vision["image_size"])
        self._normalize = Normalizer.read(files.image, mean=IMAGENET_STANDARD[0], std=IMAGENET_STANDARD[1])
        self._resampling = resampling_filter(files.image, Image.Resampling.BILINEAR)

    def prepare(self, image: Image.Image) -> PreparedMedia:
        pixels = self._normalize(resize(image, self._side, self._side, self._resampling))[np.newaxis]
        return PreparedMedia("image", {"pixel_values": pixels}, self._text, self._tokens)


class Gemma4Processor:
    def __init__(self, files: ModelFiles, image_token: str) -> None:
        self.placeholder = Placeholder(image_token, files.token_id("image_token_id", "image_token_index"))
        self._begin = str(files.tokenizer.get("boi_token") or "<|image>")
        self._end = str(files.tokenizer.get("eoi_token") or "<image|>")
        settings, vision = files.image, files.vision
        self._normalize = Normalizer.read(
            settings, mean=IMAGENET_STANDARD[0], std=IMAGENET_STANDARD[1], normalize=False
        )
        self._patch = int(settings.get("patch_size") or vision.get("patch_size") or 16)
        self._pool = int(settings.get("pooling_kernel_size") or vision.get("pooling_kernel_size") or 3)
        self._max_tokens = int(settings.get("max_soft_tokens") or vision.get("default_output_length") or 280)

    def prepare(self, image: Image.Image) -> PreparedMedia:
        height, width = self._target_size(image.height, image.width)
        pixels = self._normalize(resize(image, height, width, Image.Resampling.BICUBIC))[np.newaxis]
        tokens = (height // self._patch) * (width // self._patch) // self._pool**2
        text = f"{self._begin}{self.placeholder.text * tokens}{self._end}"
        return PreparedMedia("image", {"pixel_values": pixels}, text, tokens)

    def _target_size(self, height: int, width: int) -> tuple[int, int]:
        """The largest size of this aspect ratio whose sides are multiples of a pooled block and whose tokens fit."""
        unit = self._pool * self._patch
        scale = math.sqrt(self._max_tokens * unit * unit / (height * width))
        target_height, target_width = (math.floor(scale * side / unit) * unit for side in (height, width))
        if not target_height and not target_width:
            raise MediaRefused(f"the image of {width} x {height} pixels cannot be scaled to this model's input size")
        if not target_height:
            return unit, min(width // height, self._max_tokens) * unit
        if not target_width:
            return min(height // width, self._max_tokens) * unit, unit
        return target_height, target_width
