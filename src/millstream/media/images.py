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
MOST_RATIO = 200
"""One side may be so many times the other: resizing takes memory that grows with the ratio."""
STRIP = 2**18
"""Pixels that are converted at once. Pillow's conversions copy; a whole image would be there four times over."""

PIXEL_BYTES = {"WEBP": 20, "JPEG": 14}
"""What decoding takes at its peak, for each pixel: measured, see `tests/media/test_hostile_images.py`. A WEBP is
held four times by its decoder; a progressive JPEG holds its coefficients beside the pixels."""
USUAL_PIXEL_BYTES = 10

# Pillow takes the memory of an image in blocks. Those of its usual 16 MiB come from the C library's heap, which keeps
# them for the thread after they are freed: gigabytes, after a few large images. Larger ones go back to the system.
Image.core.set_block_size(64 * 2**20)  # type: ignore[attr-defined]

# What Pillow's decoders raise for files that are damaged: it has no error of its own for that.
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, MemoryError)


def open_image(data: bytes, limits: MediaLimits) -> Image.Image:
    """The image as RGB, upright, on white where it is transparent. Raises `MediaRefused`."""
    with decoding("image", WANTED):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(image, limits)
        ImageOps.exif_transpose(image, in_place=True)  # otherwise it gives a copy, turned or not
        return as_rgb(image)


def image_bytes(data: bytes, limits: MediaLimits) -> int:
    """What decoding this image will take, from its header. Raises `MediaRefused`."""
    with decoding("image", WANTED):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(image, limits)
        return image.width * image.height * pixel_bytes(image)


def pixel_bytes(image: Image.Image) -> int:
    """Memory that decoding takes for each pixel."""
    return PIXEL_BYTES.get(image.format or "", USUAL_PIXEL_BYTES)


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
    if max(width, height) > MOST_RATIO * min(width, height):
        raise MediaRefused(
            f"an image of {width} x {height} pixels is too narrow: one side may be at most {MOST_RATIO} times the other"
        )


def as_rgb(image: Image.Image) -> Image.Image:
    """Itself where it is RGB already. Converted in strips: that takes the memory of the result and little more."""
    image.load()
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    seen = Image.new("RGB", image.size, None)
    rows = max(1, STRIP // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        seen.paste(_strip_as_rgb(image.crop(box)), box)
    return seen


def _strip_as_rgb(strip: Image.Image) -> Image.Image:
    if strip.mode.startswith("I;16"):  # Pillow would cut off what is above 255
        return strip.point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
    if strip.mode in ("RGBA", "LA", "PA") or "transparency" in strip.info:
        seen = strip.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return strip.convert("RGB")
