"""Finds the address or the data of an image or a file in a part of a message, in the forms that clients send."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from millstream.errors import BadRequest, UnsupportedParameter

Part = Mapping[str, Any]

_ADDRESSES = ("image_url", "image", "source", "url")
"""Fields that have the address of an image, or an object with it."""
_DATA = ("data", "base64")
_MEDIA_TYPES = ("media_type", "mime_type", "mimeType")
_TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/x-yaml", "application/toml")


def url_of(value: object, path: str) -> str:
    """Accepts OpenAI's object with a `url`, and a plain string, since many clients send one."""
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise BadRequest(f'{path} must be {{"url": "..."}}: an http(s) URL or a data URI.', param=path)
    return url


def image_source(part: Part, path: str) -> str:
    """Returns a URL or a data URI. The image is in a field of the part, or of its `source`; as a URL, or in base64."""
    kind = part.get("type")
    if kind == "image_url":
        return url_of(part.get("image_url"), f"{path}.image_url")
    if kind == "input_image" and part.get("image_url") is None and part.get("file_id") is not None:
        raise UnsupportedParameter(
            f"{path}.file_id is not supported: this server stores no files. Send the image as image_url.",
            param=f"{path}.file_id",
        )
    if (data := _data_uri(part)) is not None:
        return data
    field = next((name for name in _ADDRESSES if part.get(name) is not None), "image_url")
    value = part.get(field)
    if isinstance(value, dict) and (data := _data_uri(value)) is not None:
        return data
    address = url_of(value, f"{path}.{field}")
    # AI SDKs send bare base64 in `image`.
    return address if field != "image" or ":" in address[:32] else f"data:image/png;base64,{address}"


def _data_uri(holder: Part) -> str | None:
    data = next((holder[name] for name in _DATA if isinstance(holder.get(name), str)), None)
    if data is None or data.startswith("data:"):
        return data
    media_type = next((holder[name] for name in _MEDIA_TYPES if isinstance(holder.get(name), str)), "image/png")
    return f"data:{media_type};base64,{data}"


def text_file(part: Part, path: str) -> str:
    """Returns the text of a file that is in the request as a data URI. Raises for other files."""
    inner = part.get("file") if isinstance(part.get("file"), dict) else part
    data = inner.get("file_data") if isinstance(inner, dict) else None
    if not isinstance(data, str):
        raise UnsupportedParameter(
            f"{path} has a file that is not in the request. Send text files in file_data, as a data URI.",
            param=path,
        )
    head, comma, body = data.partition(",")
    media_type, *options = head.removeprefix("data:").split(";")
    if not data.startswith("data:") or not comma or not _is_text(media_type.strip().lower()):
        raise UnsupportedParameter(
            f"{path} has a file of the type {media_type[:40] or 'unknown'!r}; only text files are supported, as a data "
            "URI such as data:text/plain;base64,...",
            param=path,
        )
    return _decoded(body, "base64" in options, path)


def _is_text(media_type: str) -> bool:
    return media_type.startswith("text/") or media_type in _TEXT_TYPES or media_type.endswith(("+json", "+xml"))


def _decoded(body: str, is_base64: bool, path: str) -> str:
    try:
        return (base64.b64decode(body, validate=True) if is_base64 else unquote_to_bytes(body)).decode()
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"{path} has a file that is not text in UTF-8: {error}.", param=path) from error
