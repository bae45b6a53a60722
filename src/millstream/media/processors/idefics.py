"""Idefics3 and SmolVLM: tiles of the image in rows, and then the whole of it made small."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from millstream.media.port import Prepared
from millstream.media.processors.base import HALVES, Finish, ModelFiles, filter_of, resized

MOST_SIDE = 4096
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


class IdeficsProcessor:
    def __init__(self, files: ModelFiles, name: str) -> None:
        self.marker = name
        self.token_id = files.id_of("image_token_id", "image_token_index")
        looks, vision = files.looks, files.vision
        self._finish = Finish.read(looks, mean=HALVES[0], std=HALVES[1])
        self._way = filter_of(looks, Image.Resampling.LANCZOS)
        self._tile = int((looks.get("max_image_size") or {}).get("longest_edge") or vision.get("image_size") or 364)
        self._longest = int((looks.get("size") or {}).get("longest_edge") or 4 * self._tile)
        self._split = bool(looks.get("do_image_splitting", True))
        patches = self._tile // int(vision["patch_size"])
        self._each = patches**2 // int(files.config.get("scale_factor") or 2) ** 2

    def prepare(self, image: Image.Image) -> Prepared:
        height, width = self._fitted(image.height, image.width)
        whole = resized(image, height, width, self._way)
        tiles, rows, columns = self._tiles(whole) if self._split else ([self._small(whole)], 0, 0)
        pixels = np.stack([self._finish(tile) for tile in tiles])[np.newaxis]
        return Prepared("image", {"pixel_values": pixels}, self._text(rows, columns), len(tiles) * self._each)

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """The longest side as the settings say, the other even."""
        ratio = width / height
        if width >= height:
            width = self._longest
            height = int(width / ratio)
            height += height % 2
        else:
            height = self._longest
            width = int(height * ratio)
            width += width % 2
        over = max(1.0, max(height, width) / MOST_SIDE)
        return max(1, int(height / over)), max(1, int(width / over))

    def _tiles(self, image: Image.Image) -> tuple[list[Image.Image], int, int]:
        tile, ratio = self._tile, image.width / image.height
        if image.width >= image.height:
            width = math.ceil(image.width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(image.height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        width, height = max(width, tile), max(height, tile)
        image = resized(image, height, width, self._way)
        rows, columns = height // tile, width // tile
        if rows == columns == 1:
            return [image], 0, 0
        boxes = [(column * tile, row * tile) for row in range(rows) for column in range(columns)]
        tiles = [image.crop((left, top, left + tile, top + tile)) for left, top in boxes]
        return [*tiles, self._small(image)], rows, columns

    def _small(self, image: Image.Image) -> Image.Image:
        return resized(image, self._tile, self._tile, self._way)

    def _text(self, rows: int, columns: int) -> str:
        each = self.marker * self._each
        lines = [
            "".join(f"{AROUND}<row_{row}_col_{column}>{each}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(lines) + ("\n" if rows else "") + f"{AROUND}{WHOLE}{each}{AROUND}"
