"""Image processor of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: native aspect ratio, cut into patches in merge order."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from millstream.errors import MediaRefused
from millstream.media.port import Placeholder, PreparedMedia
from millstream.media.processors.base import IMAGENET_STANDARD, OPENAI_CLIP, ModelFiles, Normalizer, resize

MIN_PIXELS, MAX_PIXELS = 56 * 56, 14 * 14 * 4 * 1280
MAX_ASPECT_RATIO = 200


class QwenProcessor:
    def __init__(self, files: ModelFiles, image_token: str) -> None:
        self.placeholder = Placeholder(image_token, files.token_id("image_token_id", "image_token_index"))
        settings, vision = files.image, files.vision
        qwen3 = str(files.config.get("model_type", "")).startswith("qwen3")
        mean, std = IMAGENET_STANDARD if qwen3 else OPENAI_CLIP
        self._normalize = Normalizer.read(settings, mean=mean, std=std)
        self._patch = int(settings.get("patch_size") or vision.get("patch_size") or (16 if qwen3 else 14))
        self._merge = int(settings.get("merge_size") or vision.get("spatial_merge_size") or 2)
        self._frames = int(settings.get("temporal_patch_size") or vision.get("temporal_patch_size") or 2)
        size = settings.get("size") or {}
        self._min_pixels = int(settings.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS)
        self._max_pixels = int(settings.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS)

    def prepare(self, image: Image.Image) -> PreparedMedia:
        unit = self._patch * self._merge
        height, width = target_size(image.height, image.width, unit, self._min_pixels, self._max_pixels)
        pixels = self._normalize(resize(image, height, width, Image.Resampling.BICUBIC))
        patches, grid = to_patches(
            np.broadcast_to(pixels, (self._frames, *pixels.shape)), self._patch, self._merge, self._frames
        )
        tokens = int(grid.prod()) // self._merge**2
        tensors = {"pixel_values": patches, "image_grid_thw": grid}
        return PreparedMedia("image", tensors, self.placeholder.text * tokens, tokens)


def to_patches(frames: np.ndarray, patch: int, merge: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the patches and their grid.

    Patches have one row each (channel, frame of the group, row, column), and patches that are merged later are
    adjacent. The grid has the numbers of frame groups, rows and columns of patches.
    """
    count, channels, height, width = frames.shape
    rows, columns = height // patch, width // patch
    shape = (count // group, group, channels, rows // merge, merge, patch, columns // merge, merge, patch)
    patches = frames.reshape(shape).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    flat = np.ascontiguousarray(patches).reshape(-1, channels * group * patch * patch)
    return flat, np.array([[count // group, rows, columns]], np.int64)


def target_size(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, *, frames: int = 1, padded: int = 1
) -> tuple[int, int]:
    """The nearest multiples of `factor` for which the pixels of all frames together are within the bounds. `padded`:
    the number of frames once the last group is filled up."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise MediaRefused(
            f"the image of {width} x {height} pixels is too narrow for this model: one side may be at most "
            f"{MAX_ASPECT_RATIO} times the other"
        )
    new_height, new_width = (max(factor, round(side / factor) * factor) for side in (height, width))
    if padded * new_height * new_width > max_pixels:
        scale = math.sqrt(frames * height * width / max_pixels)
        new_height, new_width = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif padded * new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        new_height, new_width = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return new_height, new_width
