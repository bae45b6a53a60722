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
        patches, grid = patches_of(
            np.broadcast_to(pixels, (self._frames, *pixels.shape)), self._patch, self._merge, self._frames
        )
        places = int(grid.prod()) // self._merge**2
        return Prepared("image", {"pixel_values": patches, "image_grid_thw": grid}, self.marker * places, places)


def patches_of(frames: np.ndarray, patch: int, merge: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """One line a patch: channel, frame of the group, row, column. Patches that are merged later stand together. And how
    many groups, rows and columns of patches there are."""
    count, channels, height, width = frames.shape
    rows, columns = height // patch, width // patch
    shape = (count // group, group, channels, rows // merge, merge, patch, columns // merge, merge, patch)
    lines = frames.reshape(shape).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    flat = np.ascontiguousarray(lines).reshape(-1, channels * group * patch * patch)
    return flat, np.array([[count // group, rows, columns]], np.int64)


def fitted_size(
    height: int, width: int, factor: int, least: int, most: int, *, frames: int = 1, padded: int = 1
) -> tuple[int, int]:
    """Multiples of `factor` near the size of the frames, with a number of pixels, all together, within the bounds.
    `padded`: how many frames there are with those that fill the last group."""
    if max(height, width) > MOST_RATIO * min(height, width):
        raise MediaRefused(
            f"an image of {width} x {height} pixels is too narrow for this model: one side may be at most {MOST_RATIO} "
            "times the other"
        )
    high, wide = max(factor, round(height / factor) * factor), max(factor, round(width / factor) * factor)
    if padded * high * wide > most:
        scale = math.sqrt(frames * height * width / most)
        high, wide = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif padded * high * wide < least:
        scale = math.sqrt(least / (frames * height * width))
        high, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return high, wide
