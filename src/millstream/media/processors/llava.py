"""LLaVA: one size for all images, and a fixed number of tokens."""

from __future__ import annotations

import numpy as np
from PIL import Image

from millstream.media.port import Prepared
from millstream.media.processors.base import CLIP, HALVES, Finish, ModelFiles, filter_of, resized


class LlavaProcessor:
    def __init__(self, files: ModelFiles, name: str) -> None:
        self.marker = name
        self.token_id = files.id_of("image_token_index", "image_token_id")
        looks, vision = files.looks, files.vision
        clip = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
        side = int(vision["image_size"])
        mean, std = CLIP if clip else HALVES
        self._finish = Finish.read(looks, mean=mean, std=std)
        self._way = filter_of(looks, Image.Resampling.BICUBIC)
        size = looks.get("size") or {}
        # A CLIP keeps the proportions and cuts the middle out; the others squeeze the whole image in.
        self._shortest = int(size.get("shortest_edge", side)) if clip and "height" not in size else None
        self._side = side
        patches = (side // int(vision["patch_size"])) ** 2
        first = files.config.get("vision_feature_select_strategy", "default") == "default"
        self._places = patches + int(clip) - int(first)

    def prepare(self, image: Image.Image) -> Prepared:
        fitted = resized(image, self._side, self._side, self._way) if self._shortest is None else self._cut(image)
        pixels = self._finish(fitted)[np.newaxis]
        return Prepared("image", {"pixel_values": pixels}, self.marker * self._places, self._places)

    def _cut(self, image: Image.Image) -> Image.Image:
        shortest = self._shortest or self._side
        short, long = sorted(image.size)
        longest = int(shortest * long / short)
        height, width = (longest, shortest) if image.width <= image.height else (shortest, longest)
        fitted = resized(image, height, width, self._way)
        left, top = (width - self._side) // 2, (height - self._side) // 2
        return fitted.crop((left, top, left + self._side, top + self._side))
