"""Opens an untrusted image as RGB. Its size is checked before a pixel is decoded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from millstream.errors import MediaRefused
from millstream.media.limits import MediaLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Raster formats whose decoders neither run another program nor open another file."""
ACCEPTED = "send a PNG, JPEG, WEBP, GIF, BMP or TIFF"
MAX_ASPECT_RATIO = 200
"""Long side to short side: the memory for resizing grows with it."""
STRIP_PIXELS = 2**18
"""Pixels to convert at once. Pillow's conversions copy, so converting in one piece would hold the image four times."""

MAX_FRACTION = 2.0
"""Numbers with fractions up to this count from 0 to 1, with some that are brighter than white."""
_DEEP = ("I", "F")
"""Pillow's modes of grey images of more than 8 bits: I, I;16, I;16B, F."""

PIXEL_BYTES = {"WEBP": 20, "JPEG": 14}
"""Peak memory per pixel of decoding, by format: measured, see `tests/media/test_hostile_images.py`. The WEBP decoder
holds four copies of the image; a progressive JPEG holds its coefficients besides the pixels."""
DEFAULT_PIXEL_BYTES = 10

# Pillow allocates images in blocks. Blocks of its default 16 MiB come from the C library's heap, which retains them per
# thread after they are freed: gigabytes, after a few large images. Larger blocks are returned to the system.
Image.core.set_block_size(64 * 2**20)  # type: ignore[attr-defined]

# What Pillow's decoders raise for damaged files: Pillow has no exception class for that.
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, MemoryError)


def open_image(data: bytes, limits: MediaLimits) -> Image.Image:
    """The image as RGB, upright, composited on white if it is transparent. Raises `MediaRefused`."""
    with decoding("image", ACCEPTED):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(image, limits)
        ImageOps.exif_transpose(image, in_place=True)  # not in place, it would always copy
        return as_rgb(image)


def image_bytes(data: bytes, limits: MediaLimits) -> int:
    """Peak memory of decoding this image, from its header. Raises `MediaRefused`."""
    with decoding("image", ACCEPTED):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(image, limits)
        return image.width * image.height * pixel_bytes(image)


def pixel_bytes(image: Image.Image) -> int:
    """Peak memory per pixel of decoding."""
    return PIXEL_BYTES.get(image.format or "", DEFAULT_PIXEL_BYTES)


@contextmanager
def decoding(label: str, accepted: str) -> Iterator[None]:
    """Turns what Pillow raises into `MediaRefused`. `accepted` says which formats would be right."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise MediaRefused(f"the file is not in a supported {label} format; {accepted}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Pillow's own limit, if --media-pixels is above it; the warning is raised where warnings are errors.
        raise MediaRefused(f"this {label} is too large: {error}") from error
    except _DAMAGED as error:
        raise MediaRefused(f"this {label} is damaged: {error}; {accepted}") from error


def check_size(image: Image.Image, limits: MediaLimits) -> None:
    width, height = image.size
    if width * height > limits.pixels:
        raise MediaRefused(
            f"the image has {width} x {height} = {width * height} pixels; this server takes at most {limits.pixels} "
            "(--media-pixels). Send a smaller one"
        )
    if not width or not height:
        raise MediaRefused("the image has no pixels")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise MediaRefused(
            f"the image of {width} x {height} pixels is too narrow: one side may be at most {MAX_ASPECT_RATIO} times "
            "the other"
        )


def as_rgb(image: Image.Image) -> Image.Image:
    """Returns the image itself if it is RGB. Converts in strips: the peak memory is little more than the result."""
    image.load()
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    white = _white(image) if image.mode.startswith(_DEEP) else None
    rgb = Image.new("RGB", image.size, None)
    for box in _strips(image):
        strip = image.crop(box)
        rgb.paste(_strip_as_rgb(strip) if white is None else _deep_as_rgb(strip, white), box)
    return rgb


def _strips(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield 0, top, image.width, min(top + rows, image.height)


def _strip_as_rgb(strip: Image.Image) -> Image.Image:
    if strip.mode in ("RGBA", "LA", "PA") or "transparency" in strip.info:
        rgba = strip.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return strip.convert("RGB")


def _white(image: Image.Image) -> float:
    """The value of white in a grey image of more than 8 bits. Files of 32 bits do not say it, so their values tell."""
    if image.mode.startswith("I;16") or (image.format == "PPM" and image.mode == "I"):
        return 65535  # Pillow scales the values of other PGM files to that
    if image.format == "PPM":
        return 1
    peak = max(_peak(_values(image.crop(box))) for box in _strips(image))
    if image.mode == "F" and peak <= MAX_FRACTION:
        return 1
    return next((white for white in (255, 65535) if peak <= white), peak)


def _values(strip: Image.Image) -> NDArray[np.float64]:
    values = np.array(strip, np.float64)
    values[np.isnan(values)] = 0
    return values


def _peak(values: NDArray[np.float64]) -> float:
    return float(np.max(values, where=np.isfinite(values), initial=0))


def _deep_as_rgb(strip: Image.Image, white: float) -> Image.Image:
    """Pillow would clip values above 255."""
    values = _values(strip)
    levels = np.clip(values * (255 / white) + 0.5, 0, 255).astype(np.uint8)
    levels[values == strip.info.get("transparency")] = 255
    return Image.fromarray(levels).convert("RGB")
