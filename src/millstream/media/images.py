"""Opens an image that nobody has looked at yet: its size is checked before a pixel is decoded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image, ImageOps, UnidentifiedImageError

from millstream.errors import MediaRefused
from millstream.media.limits import MediaLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Raster formats whose decoders run no other program and read no other file."""
WANTED = "send a PNG, JPEG, WEBP, GIF, BMP or TIFF"

# What Pillow's decoders raise for files that are damaged: it has no error of its own for that.
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, MemoryError)


def open_image(data: bytes, limits: MediaLimits) -> Image.Image:
    """The image as RGB, upright, on white where it is transparent. Raises `MediaRefused`."""
    with decoding("image", WANTED):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(image, limits)
        return as_rgb(ImageOps.exif_transpose(image))


@contextmanager
def decoding(what: str, wanted: str) -> Iterator[None]:
    """What Pillow raises, as a refusal that says what would be right."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise MediaRefused(f"a file is no {what} that can be read; {wanted}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Pillow's own bound, for those who have set ours above it; a warning where warnings are errors.
        raise MediaRefused(f"this {what} is too large: {error}") from error
    except _DAMAGED as error:
        raise MediaRefused(f"this {what} is damaged: {error}; {wanted}") from error


def check_size(image: Image.Image, limits: MediaLimits) -> None:
    width, height = image.size
    if width * height > limits.pixels:
        raise MediaRefused(
            f"an image has {width} x {height} = {width * height} pixels; this server takes {limits.pixels} "
            "(--media-pixels). Send a smaller one"
        )
    if not width or not height:
        raise MediaRefused("an image has no pixels")


def as_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        seen = image.convert("RGBA")
        ground = Image.new("RGBA", seen.size, "white")
        return Image.alpha_composite(ground, seen).convert("RGB")
    return image.convert("RGB")
