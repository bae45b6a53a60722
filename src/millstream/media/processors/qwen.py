"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: the image's own proportions, cut into patches in the order of merged blocks."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from millstream.errors import MediaRefused
from millstream.media.port import Prepared
from millstream.media.processors.base import CLIP, HALVES, Finish, ModelFiles, resized

LEAST_PIXELS, MOST_PIXELS = 56 * 56, 14 * 14 * 4 * 1280
MOST_RATIO = 200


class QwenProcessor:
    def __init__(self, files: ModelFiles, name: str) -> None:
        self.marker = name
        self.token_id = files.id_of("image_token_id", "image_token_index")
        looks, vision = files.looks, files.vision
        third = str(files.config.get("model_type", "")).startswith("qwen3")
        mean, std = HALVES if third else CLIP
        self._finish = Finish.read(looks, mean=mean, std=std)
        self._patch = int(looks.get("patch_size") or vision.get("patch_size") or (16 if third else 14))
        self._merge = int(looks.get("merge_size") or vision.get("spatial_merge_size") or 2)
        self._frames = int(looks.get("temporal_patch_size") or vision.get("temporal_patch_size") or 2)
        size = looks.get("size") or {}
        self._least = int(looks.get("min_pixels") or size.get("shortest_edge") or LEAST_PIXELS)
        self._most = int(looks.get("max_pixels") or size.get("longest_edge") or MOST_PIXELS)

    def prepare(self, image: Image.Image) -> Prepared:
        height, width = fitted_size(image.height, image.width, self._patch * self._merge, self._least, self._most)
        pixels = self._finish(resized(image, height, width, Image.Resampling.BICUBIC))
        rows, columns = height // self._patch, width // self._patch
        tensors = {"pixel_values": self._patches(pixels), "image_grid_thw": np.array([[1, rows, columns]], np.int64)}
        places = rows * columns // self._merge**2
        return Prepared(tensors, self.marker * places, places)

    def _patches(self, pixels: np.ndarray) -> np.ndarray:
        """One line a patch: channel, frame, row, column. Patches that are merged later stand together."""
        channels, height, width = pixels.shape
        patch, merge = self._patch, self._merge
        blocks = pixels.reshape(
            channels, height // (patch * merge), merge, patch, width // (patch * merge), merge, patch
        )
        lines = blocks.transpose(1, 4, 2, 5, 0, 3, 6)
        frames = np.repeat(lines[:, :, :, :, :, np.newaxis], self._frames, axis=5)
        return frames.reshape(-1, channels * self._frames * patch * patch)


def fitted_size(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Multiples of `factor` near the image's size, with a number of pixels within the bounds."""
    if max(height, width) > MOST_RATIO * min(height, width):
        raise MediaRefused(
            f"an image of {width} x {height} pixels is too narrow for this model: one side may be at most {MOST_RATIO} "
            "times the other"
        )
    high, wide = (max(factor, round(side / factor) * factor) for side in (height, width))
    if high * wide > most:
        scale = math.sqrt(height * width / most)
        return tuple(max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))  # type: ignore[return-value]
    if high * wide < least:
        scale = math.sqrt(least / (height * width))
        return tuple(math.ceil(side * scale / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return high, wide
