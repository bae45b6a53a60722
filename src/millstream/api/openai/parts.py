"""Parses the parts of a message: text, images, audio and video. The service fetches their URLs later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream.errors import BadRequest, UnsupportedParameter
from millstream.types import MediaPart

Content = str | list[dict[str, object]]

AUDIO_FORMATS = ("wav", "mp3")
_DETAIL = ("auto", "low", "high")


def parse_parts(parts: list[object], path: str) -> Content:
    """Returns one string if all parts are text, since many chat templates accept no list. Otherwise the parts in the
    form of `ChatPrompt`."""
    parsed = [_part(part, f"{path}[{index}]") for index, part in enumerate(parts)]
    texts = [part["text"] for part in parsed if part["type"] == "text"]
    return "".join(map(str, texts)) if len(texts) == len(parsed) else parsed


def _part(part: object, path: str) -> dict[str, object]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and isinstance(kind, str):
        if kind in _PARSERS:
            media = _PARSERS[kind](part, path)
            return {"type": media.kind, "media": media}
        if kind in _UNSUPPORTED:
            raise UnsupportedParameter(f"{path} has the type {kind}; {_UNSUPPORTED[kind]}.", param=path)
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise BadRequest(
            f'{path} must be a part: {{"type": "text", "text": "..."}} or '
            '{"type": "image_url", "image_url": {"url": "..."}}.',
            param=path,
        )
    return {"type": "text", "text": text}


def _image(part: dict[str, object], path: str) -> MediaPart:
    value = part.get("image_url")
    detail = value.get("detail") if isinstance(value, dict) else None
    if detail is not None and detail not in _DETAIL:
        raise BadRequest(
            f"{path}.image_url.detail must be one of {', '.join(_DETAIL)}.", param=f"{path}.image_url.detail"
        )
    return MediaPart("image", _url(value, f"{path}.image_url"), path)


def _video(part: dict[str, object], path: str) -> MediaPart:
    return MediaPart("video", _url(part.get("video_url"), f"{path}.video_url"), path)


def _audio(part: dict[str, object], path: str) -> MediaPart:
    value = part.get("input_audio")
    audio = value if isinstance(value, dict) else {}
    data, file_format = audio.get("data"), audio.get("format")
    if not isinstance(data, str) or file_format not in AUDIO_FORMATS:
        raise BadRequest(
            f'{path}.input_audio must be {{"data": "...", "format": "wav"}}, with the file in base64. The format is '
            f"{' or '.join(AUDIO_FORMATS)}.",
            param=f"{path}.input_audio",
        )
    return MediaPart("audio", f"data:audio/{file_format};base64,{data}", path)


def _url(value: object, path: str) -> str:
    """Accepts OpenAI's object with a `url`, and a plain string, since many clients send one."""
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise BadRequest(f'{path} must be {{"url": "..."}}: an http(s) URL or a data URI.', param=path)
    return url


_PARSERS: dict[str, Callable[[dict[str, object], str], MediaPart]] = {
    "image_url": _image,
    "input_audio": _audio,
    "video_url": _video,
}
_UNSUPPORTED = {
    "input_image": "send images as image_url",
    "image": "send images as image_url",
    "audio_url": "send audio as input_audio",
    "video": "send videos as video_url",
    "file": "files are not supported",
}

_STRING = {"type": "string"}
_SOURCE = {"type": "string", "minLength": 1, "description": "A data URI, an http(s) URL or an allowed file."}


def _source_schema(**more: object) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "required": ["url"], "properties": {"url": _SOURCE, **more}}, _SOURCE]}


_AUDIO = {
    "type": "object",
    "required": ["data", "format"],
    "properties": {"data": {"type": "string", "description": "Base64."}, "format": {"enum": list(AUDIO_FORMATS)}},
}
_PARTS = [
    ("text", _STRING),
    ("image_url", _source_schema(detail={"enum": [None, *_DETAIL]})),
    ("video_url", _source_schema()),
    ("input_audio", _AUDIO),
]
PART_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "title": kind,
            "type": "object",
            "required": ["type", kind],
            "properties": {"type": {"const": kind}, kind: value},
        }
        for kind, value in _PARTS
    ]
}
