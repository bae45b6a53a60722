"""Image processor of LLaVA: one size for all images, and a fixed number of tokens."""

from __future__ import annotations

import numpy as np
from PIL import Image

from millstream.media.port import Placeholder, PreparedMedia
from millstream.media.processors.base import (
    IMAGENET_STANDARD,
    OPENAI_CLIP,
    ModelFiles,
    Normalizer,
    resampling_filter,
    resize,
)


class LlavaProcessor:
    def __init__(self, files: ModelFiles, image_token: str) -> None:
        self.placeholder = Placeholder(image_token, files.token_id("image_token_index", "image_token_id"))
        settings, vision = files.image, files.vision
        clip = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
        side = int(vision["image_size"])
        mean, std = OPENAI_CLIP if clip else IMAGENET_STANDARD
        self._normalize = Normalizer.read(settings, mean=mean, std=std)
        self._resampling = resampling_filter(settings, Image.Resampling.BICUBIC)
        size = settings.get("size") or {}
        # CLIP resizes the short side and crops the centre; the other towers ignore the aspect ratio.
        self._shortest = int(size.get("shortest_edge", side)) if clip and "height" not in size else None
        self._side = side
        patches = (side // int(vision["patch_size"])) ** 2
        # The "default" strategy drops the first feature, which for CLIP is its class token.
        drops_first = files.config.get("vision_feature_select_strategy", "default") == "default"
        self._tokens = patches + int(clip) - int(drops_first)

    def prepare(self, image: Image.Image) -> PreparedMedia:
        if self._shortest is None:
            scaled = resize(image, self._side, self._side, self._resampling)
        else:
            scaled = self._center_crop(image, self._shortest or self._side)
        pixels = self._normalize(scaled)[np.newaxis]
        return PreparedMedia("image", {"pixel_values": pixels}, self.placeholder.text * self._tokens, self._tokens)

    def _center_crop(self, image: Image.Image, shortest: int) -> Image.Image:
        short, long = sorted(image.size)
        longest = int(shortest * long / short)
        height, width = (longest, shortest) if image.width <= image.height else (shortest, longest)
        scaled = resize(image, height, width, self._resampling)
        left, top = (width - self._side) // 2, (height - self._side) // 2
        return scaled.crop((left, top, left + self._side, top + self._side))
