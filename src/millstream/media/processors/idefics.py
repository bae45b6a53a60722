"""Image processor of Idefics3 and SmolVLM: the image as a grid of tiles, followed by a downscaled copy of it all."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from millstream.media.port import Placeholder, PreparedMedia
from millstream.media.processors.base import IMAGENET_STANDARD, ModelFiles, Normalizer, resampling_filter, resize

MAX_SIDE = 4096
AROUND, GLOBAL = "<fake_token_around_image>", "<global-img>"


class IdeficsProcessor:
    def __init__(self, files: ModelFiles, image_token: str) -> None:
        self.placeholder = Placeholder(image_token, files.token_id("image_token_id", "image_token_index"))
        settings, vision = files.image, files.vision
        self._normalize = Normalizer.read(settings, mean=IMAGENET_STANDARD[0], std=IMAGENET_STANDARD[1])
        self._resampling = resampling_filter(settings, Image.Resampling.LANCZOS)
        self._tile = int((settings.get("max_image_size") or {}).get("longest_edge") or vision.get("image_size") or 364)
        self._longest = int((settings.get("size") or {}).get("longest_edge") or 4 * self._tile)
        self._split = bool(settings.get("do_image_splitting", True))
        patches = self._tile // int(vision["patch_size"])
        self._tokens_per_tile = patches**2 // int(files.config.get("scale_factor") or 2) ** 2

    def prepare(self, image: Image.Image) -> PreparedMedia:
        height, width = self._target_size(image.height, image.width)
        scaled = resize(image, height, width, self._resampling)
        tiles, rows, columns = self._tiles(scaled) if self._split else ([self._thumbnail(scaled)], 0, 0)
        pixels = np.stack([self._normalize(tile) for tile in tiles])[np.newaxis]
        tokens = len(tiles) * self._tokens_per_tile
        return PreparedMedia("image", {"pixel_values": pixels}, self._text(rows, columns), tokens)

    def _target_size(self, height: int, width: int) -> tuple[int, int]:
        """The long side as the settings say, the short side even."""
        ratio = width / height
        if width >= height:
            width = self._longest
            height = int(width / ratio)
            height += height % 2
        else:
            height = self._longest
            width = int(height * ratio)
            width += width % 2
        excess = max(1.0, max(height, width) / MAX_SIDE)
        return max(1, int(height / excess)), max(1, int(width / excess))

    def _tiles(self, image: Image.Image) -> tuple[list[Image.Image], int, int]:
        tile, ratio = self._tile, image.width / image.height
        if image.width >= image.height:
            width = math.ceil(image.width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(image.height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        width, height = max(width, tile), max(height, tile)
        image = resize(image, height, width, self._resampling)
        rows, columns = height // tile, width // tile
        if rows == columns == 1:
            return [image], 0, 0
        corners = [(column * tile, row * tile) for row in range(rows) for column in range(columns)]
        tiles = [image.crop((left, top, left + tile, top + tile)) for left, top in corners]
        return [*tiles, self._thumbnail(image)], rows, columns

    def _thumbnail(self, image: Image.Image) -> Image.Image:
        return resize(image, self._tile, self._tile, self._resampling)

    def _text(self, rows: int, columns: int) -> str:
        tile = self.placeholder.text * self._tokens_per_tile
        lines = [
            "".join(f"{AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(lines) + ("\n" if rows else "") + f"{AROUND}{GLOBAL}{tile}{AROUND}"
