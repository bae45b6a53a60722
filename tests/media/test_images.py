"""Images: formats, modes, and checks before decoding."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from millstream.errors import MediaRefused
from millstream.media.images import open_image
from millstream.media.limits import MediaLimits

LIMITS = MediaLimits(pixels=10_000)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header declares a huge size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats(kind: str) -> None:
    image = open_image(saved(Image.new("RGB", (30, 20), (250, 10, 10)), kind), LIMITS)
    assert (image.mode, image.size) == ("RGB", (30, 20))
    red, green, blue = image.getpixel((15, 10))
    assert red > 240 and green < 20 and blue < 20


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_modes(mode: str) -> None:
    image = Image.new("L", (4, 4), 255).convert(mode) if mode != "I;16" else Image.new("I;16", (4, 4))
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert open_image(saved(image, kind), LIMITS).mode == "RGB"


GREY = np.tile(np.arange(0, 256, 8, dtype=np.uint8), (32, 1))
DEEP = GREY.astype(np.uint16) * 257


def netpbm(kind: str, white: str, values: np.ndarray) -> bytes:
    return f"{kind} 32 32 {white}\n".encode() + values.tobytes()


@pytest.mark.parametrize(
    "data",
    {
        "PNG": saved(Image.fromarray(DEEP), "PNG"),
        "TIFF": saved(Image.fromarray(DEEP), "TIFF"),
        "TIFF, big endian": saved(Image.fromarray(DEEP.astype(">u2")), "TIFF"),
        "TIFF, 32 bits": saved(Image.fromarray(DEEP.astype(np.int32)), "TIFF"),
        "TIFF, 8 of 32 bits": saved(Image.fromarray(GREY.astype(np.int32)), "TIFF"),
        "TIFF, 28 of 32 bits": saved(Image.fromarray(GREY.astype(np.int32) * 2**20), "TIFF"),
        "TIFF, fractions": saved(Image.fromarray((GREY / 255).astype(np.float32)), "TIFF"),
        "TIFF, floats to 255": saved(Image.fromarray(GREY.astype(np.float32)), "TIFF"),
        "PGM": netpbm("P5", "65535", DEEP.astype(">u2")),
        "PGM, 10 bits": netpbm("P5", "1020", (GREY.astype(np.uint16) * 4).astype(">u2")),
        "PFM": netpbm("Pf", "-1.0", (GREY / 255).astype("<f4")),
    }.items(),
    ids=lambda item: item[0],
)
def test_grey_of_more_than_8_bits(data: tuple[str, bytes]) -> None:
    pixels = np.asarray(open_image(data[1], LIMITS)).astype(int)
    brightest = GREY.max() if "28 of" in data[0] else 255  # where the file does not say what is white
    assert np.abs(pixels - (GREY * (255 / brightest))[..., None]).max() <= 0.5


def test_grey_of_more_than_8_bits_without_bounds() -> None:
    """What is no number is black, what is infinite white, and a dark image stays dark."""
    odd = np.array([[0.5, np.nan, np.inf, -3.0]], np.float32)
    assert np.asarray(open_image(saved(Image.fromarray(odd), "TIFF"), LIMITS))[0, :, 0].tolist() == [128, 0, 255, 0]
    dark = open_image(b"P5 2 1 65535\n" + bytes([0, 200, 1, 0]), LIMITS)
    assert np.asarray(dark)[0, :, 0].tolist() == [1, 1]
    transparent = saved(Image.fromarray(DEEP), "PNG", transparency=int(DEEP[0, 3]))
    assert np.asarray(open_image(transparent, LIMITS))[0, 2:5, 0].tolist() == [16, 255, 32]


def test_transparent_is_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    opened = open_image(saved(image, "PNG"), LIMITS)
    assert [opened.getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (255, 255, 255)]


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (30, 20))
    exif = image.getexif()
    exif[0x0112] = 6
    assert open_image(saved(image, "JPEG", exif=exif), LIMITS).size == (20, 30)


def test_too_many_pixels() -> None:
    with pytest.raises(
        MediaRefused, match=r"101 x 100 = 10100 pixels; this server takes at most 10000 \(--media-pixels\)"
    ):
        open_image(saved(Image.new("RGB", (101, 100)), "PNG"), LIMITS)
    assert open_image(saved(Image.new("RGB", (100, 100)), "PNG"), LIMITS).size == (100, 100)


@pytest.mark.parametrize("side", [7_000, 10_000, 60_000])
def test_bombs(side: int) -> None:
    """Below Pillow's own limit, where it warns, and where it refuses."""
    data = bomb(side, side)
    assert len(data) < 200
    with pytest.raises(MediaRefused, match="pixels"):
        open_image(data, MediaLimits())


@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.4",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"RIFF\x24\x00\x00\x00WAVEfmt ",
        b"\x89PNG\r\n\x1a\n",
    ],
)
def test_files_that_are_not_images(data: bytes) -> None:
    with pytest.raises(MediaRefused, match="not in a supported image format; send a PNG, JPEG"):
        open_image(data, LIMITS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_image(kind: str) -> None:
    data = saved(Image.effect_noise((90, 90), 60).convert("RGB"), kind)
    with pytest.raises(MediaRefused, match=r"damaged|supported image format"):
        open_image(data[: len(data) // 2], LIMITS)


def test_a_bomb_in_a_text_chunk() -> None:
    """Pillow limits the decompressed size of a PNG's text chunks."""
    data = bomb(10, 10)
    text = b"zTXtx\0\0" + zlib.compress(b"x" * 100_000_000, 9)
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    with pytest.raises(MediaRefused):
        open_image(data[:33] + chunk + data[33:], LIMITS)
