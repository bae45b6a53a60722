"""Images of a request: files in base64, without a word about their type."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from millstream.errors import BadRequest
from millstream.types import Kind, MediaPart

Part = dict[str, object]

IMAGES: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "description": "A file in base64, or a data URI."},
}

_SNIFFED = 16
"""Characters of base64 that hold the first 12 bytes of a file: enough to tell its type."""
_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"BM": "bmp"}


def parse_images(value: object, path: str) -> list[Part]:
    """Returns the parts of a message, in the form of `ChatPrompt`."""
    if not isinstance(value, list):
        raise BadRequest(f"{path} must be a list of files in base64.", param=path)
    return [_part(item, f"{path}[{index}]") for index, item in enumerate(value)]


def _part(item: object, path: str) -> Part:
    if not isinstance(item, str) or not item:
        raise BadRequest(f"{path} must be a file in base64.", param=path)
    if item[:5].lower() == "data:":
        kind: Kind = "audio" if item[5:11].lower() == "audio/" else "image"
        return {"type": kind, "media": MediaPart(kind, item, path)}
    kind, subtype = _sniff(item, path)
    return {"type": kind, "media": MediaPart(kind, f"data:{kind}/{subtype};base64,{item}", path)}


def _sniff(text: str, path: str) -> tuple[Kind, str]:
    """Returns the kind of media and its type. Models that take audio get it in `images` too."""
    try:
        head = base64.b64decode(text.lstrip()[:_SNIFFED].ljust(4, "="), altchars=None, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"{path} must be a file in base64, not a path or a URL.", param=path) from error
    if head.startswith(b"RIFF") and head[8:12] == b"WAVE":
        return "audio", "wav"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image", "webp"
    return "image", next((name for magic, name in _TYPES.items() if head.startswith(magic)), "png")
