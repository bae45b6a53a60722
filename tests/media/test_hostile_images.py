"""Files made to take memory or time: each is decoded or refused within bounds. Each is opened in a process of its own,
whose peak memory is measured."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from millstream.media.images import DEFAULT_PIXEL_BYTES, PIXEL_BYTES
from support.tiers import some

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads peak memory from /proc")

SIDE = 3000
REFUSAL_BYTES = 60 * 2**20
"""Peak memory of a refusal, at most."""
PROBE = Path(__file__).parent / "memory_probe.py"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *extra: bytes, depth: int = 8, colour: int = 2, rows: bytes | None = None) -> bytes:
    """A black image, or one of the given `rows`."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    line = 1 + (width * channels * depth + 7) // 8
    packed = zlib.compress(bytes(line * height) if rows is None else rows, 1)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(extra) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    )


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def tiff(*tags: tuple[int, int, int, int]) -> bytes:
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(1000)


def huge_tile() -> bytes:
    """A TIFF of ten pixels in one tile of four thousand million."""
    return tiff(
        (256, 3, 1, 10), (257, 3, 1, 10), (258, 3, 1, 8), (259, 3, 1, 5), (262, 3, 1, 1), (277, 3, 1, 1),
        (322, 4, 1, 65520), (323, 4, 1, 65520), (324, 4, 1, 200), (325, 4, 1, 500),
    )  # fmt: skip


def many_frames() -> bytes:
    """A GIF of 300,000 frames of one pixel."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return head + frame * 300_000 + b";"


def probe(data: bytes, kind: str, folder: Path) -> dict[str, object]:
    (folder / "file").write_bytes(data)
    command = [sys.executable, str(PROBE), kind, str(folder / "file")]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


BOMBS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "texts": ("image", lambda: png(9, 9, chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(10**8)))), "damaged"),
    "many texts": (
        "image",
        lambda: png(9, 9, *[chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(10**6)))] * 500),
        "damaged",
    ),
    "a profile": ("image", lambda: png(9, 9, chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(10**8)))), "damaged"),
    "a line": ("image", lambda: png(1, 4_000_000), "too narrow"),
    "a column": ("image", lambda: png(4_000_000, 1), "too narrow"),
    "a tile": ("image", huge_tile, "damaged"),
    "frames": ("video", many_frames, "more than 5000 frames"),
    "a canvas": (
        "video",
        lambda: b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";",
        "pixels|supported video",
    ),
    "cut off": ("image", lambda: png(2000, 2000)[:400], "damaged"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_within_bounds(name: str, tmp_path: Path) -> None:
    kind, make, words = BOMBS[name]
    found = probe(make(), kind, tmp_path)
    assert any(word in str(found["refused"]) for word in words.split("|")), found
    assert int(str(found["peak"])) < REFUSAL_BYTES, found


GREY = Image.new("RGB", (SIDE, SIDE), (119, 119, 119))
LARGE: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: saved(GREY, "PNG"),
    "PNG, transparent": lambda: saved(Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 136)), "PNG"),
    "PNG, grey and transparent": lambda: saved(Image.new("LA", (SIDE, SIDE), (0, 136)), "PNG"),
    "PNG, 16 bits": lambda: saved(Image.new("I;16", (SIDE, SIDE), 119 * 257), "PNG"),
    "PNG, palette": lambda: saved(GREY.quantize(2), "PNG", transparency=1),
    "JPEG": lambda: saved(GREY, "JPEG"),
    "JPEG, progressive": lambda: saved(GREY, "JPEG", progressive=True, subsampling=0),
    "JPEG, CMYK": lambda: saved(GREY.convert("CMYK"), "JPEG", progressive=True, subsampling=0),
    "JPEG, rotated": lambda: saved(GREY, "JPEG", exif=_rotated()),
    "WEBP": lambda: saved(GREY, "WEBP", method=0),
    "WEBP, lossless": lambda: saved(GREY, "WEBP", lossless=True, quality=0, method=0),
    "GIF": lambda: saved(GREY, "GIF"),
    "TIFF": lambda: saved(GREY, "TIFF", compression="tiff_lzw"),
}


def _rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize(
    "name", some(LARGE, ["PNG, transparent", "PNG, palette", "JPEG, progressive", "WEBP", "GIF", "TIFF"])
)
def test_a_large_image_takes_the_estimated_memory_and_looks_right(name: str, tmp_path: Path) -> None:
    found = probe(LARGE[name](), "image", tmp_path)
    pixel_bytes = PIXEL_BYTES.get(name.split(",")[0], DEFAULT_PIXEL_BYTES)
    assert int(str(found["estimate"])) == pixel_bytes * SIDE * SIDE
    assert int(str(found["peak"])) < pixel_bytes * SIDE * SIDE + 10 * 2**20, found
    pixel = found["pixel"]
    assert isinstance(pixel, list)
    assert all(abs(part - 119) <= 3 for part in pixel), found
