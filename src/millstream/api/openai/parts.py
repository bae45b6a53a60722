"""The parts of a message: text, images, sound and video. What they name is fetched later, by the service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream.errors import BadRequest, UnsupportedParameter
from millstream.types import MediaPart

Content = str | list[dict[str, object]]

AUDIO_FORMATS = ("wav", "mp3")
_DETAIL = ("auto", "low", "high")


def read_parts(parts: list[object], path: str) -> Content:
    """One string where all parts are text: it is what they mean, and many templates cannot read a list. Otherwise the
    parts as `ChatPrompt` has them."""
    read = [_part(part, f"{path}[{place}]") for place, part in enumerate(parts)]
    texts = [part["text"] for part in read if part["type"] == "text"]
    return "".join(map(str, texts)) if len(texts) == len(read) else read


def _part(part: object, path: str) -> dict[str, object]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and isinstance(kind, str):
        if kind in _READERS:
            media = _READERS[kind](part, path)
            return {"type": media.kind, "media": media}
        if kind in _UNSERVED:
            raise UnsupportedParameter(f"{path} is of type {kind}; {_UNSERVED[kind]}.", param=path)
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
    sound = value if isinstance(value, dict) else {}
    data, form = sound.get("data"), sound.get("format")
    if not isinstance(data, str) or form not in AUDIO_FORMATS:
        raise BadRequest(
            f'{path}.input_audio must be {{"data": "...", "format": "wav"}}, with the file in base64; formats are '
            f"{' and '.join(AUDIO_FORMATS)}.",
            param=f"{path}.input_audio",
        )
    return MediaPart("audio", f"data:audio/{form};base64,{data}", path)


def _url(value: object, path: str) -> str:
    """OpenAI's object with a `url`; a plain string is taken too, since many clients send one."""
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise BadRequest(f'{path} must be {{"url": "..."}}: an http(s) URL or a data URI.', param=path)
    return url


_READERS: dict[str, Callable[[dict[str, object], str], MediaPart]] = {
    "image_url": _image,
    "input_audio": _audio,
    "video_url": _video,
}
_UNSERVED = {
    "input_image": "images come as image_url here",
    "image": "images come as image_url here",
    "audio_url": "sound comes as input_audio here",
    "video": "videos come as video_url here",
    "file": "files are not served",
}

_STRING = {"type": "string"}
_PLACE = {"type": "string", "minLength": 1, "description": "A data URI, an http(s) URL or a file that may be read."}


def _place_schema(**more: object) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "required": ["url"], "properties": {"url": _PLACE, **more}}, _PLACE]}


_SOUND = {
    "type": "object",
    "required": ["data", "format"],
    "properties": {"data": {"type": "string", "description": "Base64."}, "format": {"enum": list(AUDIO_FORMATS)}},
}
_PARTS = [
    ("text", _STRING),
    ("image_url", _place_schema(detail={"enum": [None, *_DETAIL]})),
    ("video_url", _place_schema()),
    ("input_audio", _SOUND),
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
