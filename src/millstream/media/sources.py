"""Reads the bytes of a media source: a data URI, an http(s) URL, or a local file below an allowed folder."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from millstream.errors import MediaRefused
from millstream.media.addresses import Lookup, system_lookup
from millstream.media.fetch import fetch, too_large
from millstream.media.limits import MediaLimits

_ACCEPTED = "an http:// or https:// URL or a data URI (data:image/png;base64,...)"
_STANDARD_BASE64 = re.compile(r"[A-Za-z0-9+/=]*+")
_FROM_URL_SAFE = str.maketrans("-_", "+/")


def is_local(source: str) -> bool:
    """True if reading `source` needs no network."""
    return not source.startswith(("http://", "https://"))


def read_source(source: str, limits: MediaLimits, lookup: Lookup = system_lookup) -> bytes:
    """The bytes of one file. Raises `MediaRefused`."""
    scheme = source[: source.find(":")].lower() if ":" in source[:12] else ""
    if scheme == "data":
        return from_data_uri(source, limits)
    if scheme in ("http", "https"):
        return fetch(source, limits, lookup)
    if scheme == "file" or (not scheme and source.startswith("/")):
        return _from_file(source, limits)
    shown = source if len(source) <= 60 else source[:57] + "..."
    raise MediaRefused(f"{shown!r} is not a media source that this server reads: send {_ACCEPTED}")


def from_data_uri(source: str, limits: MediaLimits) -> bytes:
    head, comma, body = source.partition(",")
    if not comma:
        raise MediaRefused("the data URI has no comma: send data:image/png;base64, followed by the file in base64")
    if "".join(head.split()).lower().endswith(";base64"):
        return from_base64(body, limits)
    if len(body) > 3 * limits.file_bytes:
        raise too_large(len(body) // 3, limits)
    return _check_size(unquote_to_bytes(body), limits)


def from_base64(text: str, limits: MediaLimits) -> bytes:
    size = len(text) * 3 // 4
    if size > limits.file_bytes + 1024:
        raise too_large(size, limits)
    if "%" in text:
        text = unquote_to_bytes(text).decode("latin-1")
    if not _STANDARD_BASE64.fullmatch(text):  # only if needed: each of these copies the text
        text = "".join(text.split()).translate(_FROM_URL_SAFE)
    if len(text) % 4:
        text += "=" * (-len(text) % 4)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaRefused(f"the data URI is not valid base64: {error}") from error
    return _check_size(data, limits)


def _from_file(source: str, limits: MediaLimits) -> bytes:
    """Symbolic links are resolved before the check: the real path must be below an allowed folder."""
    if not limits.folders:
        raise MediaRefused(f"this server reads no local files (--media-folder allows a folder). Send {_ACCEPTED}")
    path = _path_of(source)
    refusal = MediaRefused(f"{path} is not a file below an allowed folder (--media-folder)")
    try:
        real = path.resolve(strict=True)
        if not any(real.is_relative_to(folder.resolve()) for folder in limits.folders) or not real.is_file():
            raise refusal
        with real.open("rb") as file:
            return _check_size(file.read(limits.file_bytes + 1), limits)
    except (OSError, ValueError, RuntimeError) as error:
        # The same error in every case, so that it does not reveal which files exist elsewhere.
        raise refusal from error


def _path_of(source: str) -> Path:
    if not source.lower().startswith("file:"):
        return Path(source)
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise MediaRefused(f"{source[:60]!r} names another host; send a local file as file:///folder/name")
    return Path(url2pathname(parts.path))


def _check_size(data: bytes, limits: MediaLimits) -> bytes:
    if len(data) > limits.file_bytes:
        raise too_large(len(data), limits)
    if not data:
        raise MediaRefused("the media file is empty")
    return data
