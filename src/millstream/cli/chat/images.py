"""Images of a message: paths that are typed or dropped into the terminal, sent as data URLs."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import BadRequest

TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
}
MAX_BYTES = 50_000_000

_SUFFIXES = "|".join(suffix[1:] for suffix in TYPES)
_PATHS = re.compile(
    rf"""'(?P<single>[^'\n]+\.(?:{_SUFFIXES}))'
       | "(?P<double>[^"\n]+\.(?:{_SUFFIXES}))"
       | (?P<bare>(?:\\.|[^\s'"\\])+\.(?:{_SUFFIXES}))(?![\w/])""",
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    url: str
    """A data URL."""

    def part(self) -> dict[str, object]:
        return {"type": "image_url", "image_url": {"url": self.url}}


def read_image(path: Path) -> Image:
    """Raises `BadRequest` if it is not an image that can be sent."""
    path = path.expanduser()
    kind = TYPES.get(path.suffix.lower())
    if kind is None:
        raise BadRequest(f"{path} is not an image by its name: use {', '.join(TYPES)}.")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadRequest(f"{path} is larger than {MAX_BYTES // 1_000_000} MB: send a smaller image.")
        data = path.read_bytes()
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror or error}.") from None
    return Image(path.name, f"data:{kind};base64,{base64.b64encode(data).decode()}")


def take_images(text: str, read: Callable[[Path], Image] = read_image) -> tuple[str, list[Image]]:
    """The images whose paths are in the text, and the text with their names in place of the paths. A path that does
    not exist stays as it is: it is only text."""
    found: list[Image] = []

    def replace(match: re.Match[str]) -> str:
        written = match["single"] or match["double"] or re.sub(r"\\(.)", r"\1", match["bare"])
        path = Path(written).expanduser()
        if not path.is_file():
            return match[0]
        found.append(read(path))
        return path.name

    return _PATHS.sub(replace, text), found
