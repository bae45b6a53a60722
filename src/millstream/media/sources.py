"""From what a request names to bytes: a data URI, an http(s) URL, or a file below a folder that the operator allows."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from millstream.errors import MediaRefused
from millstream.media.addresses import LookUp, system_look_up
from millstream.media.fetch import fetch, too_large
from millstream.media.limits import MediaLimits

_WAYS = "an http:// or https:// URL or a data URI (data:image/png;base64,...)"
_PLAIN = re.compile(r"[A-Za-z0-9+/=]*+")
_STANDARD = str.maketrans("-_", "+/")


def is_local(source: str) -> bool:
    """Whether `source` needs no network: it is then read without delay."""
    return not source.startswith(("http://", "https://"))


def read_source(source: str, limits: MediaLimits, look_up: LookUp = system_look_up) -> bytes:
    """The bytes of one file. Raises `MediaRefused`."""
    scheme = source[: source.find(":")].lower() if ":" in source[:12] else ""
    if scheme == "data":
        return from_data_uri(source, limits)
    if scheme in ("http", "https"):
        return fetch(source, limits, look_up)
    if scheme == "file" or (not scheme and source.startswith("/")):
        return _from_file(source, limits)
    shown = source if len(source) <= 60 else source[:57] + "..."
    raise MediaRefused(f"{shown!r} is no media that can be read: send {_WAYS}")


def from_data_uri(source: str, limits: MediaLimits) -> bytes:
    head, comma, body = source.partition(",")
    if not comma:
        raise MediaRefused("a data URI has no comma: write data:image/png;base64, and then the file in base64")
    if head.rstrip().lower().endswith(";base64"):
        return from_base64(body, limits)
    if len(body) > 3 * limits.size:
        raise too_large(len(body) // 3, limits)
    return _within(unquote_to_bytes(body), limits)


def from_base64(text: str, limits: MediaLimits) -> bytes:
    size = len(text) * 3 // 4
    if size > limits.size + 1024:
        raise too_large(size, limits)
    if "%" in text:
        text = unquote_to_bytes(text).decode("latin-1")
    if not _PLAIN.fullmatch(text):  # only then: each of these copies the whole text
        text = "".join(text.split()).translate(_STANDARD)
    if len(text) % 4:
        text += "=" * (-len(text) % 4)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaRefused(f"a data URI is not valid base64: {error}") from error
    return _within(data, limits)


def _from_file(source: str, limits: MediaLimits) -> bytes:
    """Links are followed before the check: what counts is where the file really is."""
    if not limits.folders:
        raise MediaRefused(f"this server reads no local files (--media-folder allows a folder); send {_WAYS}")
    path = _path_of(source)
    refusal = MediaRefused(f"{path} is no file below a folder that this server reads (--media-folder)")
    try:
        real = path.resolve(strict=True)
        if not any(real.is_relative_to(folder.resolve()) for folder in limits.folders) or not real.is_file():
            raise refusal
        with real.open("rb") as file:
            return _within(file.read(limits.size + 1), limits)
    except (OSError, ValueError, RuntimeError) as error:
        # One answer for all: nobody learns here which files there are elsewhere.
        raise refusal from error


def _path_of(source: str) -> Path:
    if not source.lower().startswith("file:"):
        return Path(source)
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise MediaRefused(f"{source[:60]!r} names another machine: a local file is file:///folder/name")
    return Path(url2pathname(parts.path))


def _within(data: bytes, limits: MediaLimits) -> bytes:
    if len(data) > limits.size:
        raise too_large(len(data), limits)
    if not data:
        raise MediaRefused("a media file is empty")
    return data
