"""Parses the parts of a message: text, images, audio and video. The service fetches their URLs later.

Clients send the parts of other APIs as well, such as `input_text` or Anthropic's `image`: each stands for its obvious
equivalent. Fields that a part does not have are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from millstream.api.openai.part_sources import image_source, text_file, url_of
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.types import MediaPart, quickly_made

Content = str | list[dict[str, object]]
Part = Mapping[str, Any]

AUDIO_FORMATS = ("wav", "mp3")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, each with the field that has the text."""
_REASONING = {"thinking": "thinking", "reasoning": "text", "redacted_thinking": ""}
"""Types of parts that are reasoning, each with the field that has the text."""
_UNSUPPORTED = {
    "audio_url": "send audio as input_audio",
    "video": "send videos as video_url",
}


@quickly_made
@dataclass(frozen=True, slots=True)
class ParsedContent:
    """The content of a message, and the reasoning that was among its parts."""

    content: Content
    reasoning: str = ""


def parse_content(content: object, path: str) -> ParsedContent:
    """Accepts a string, null, or a list of parts. Null and an empty list are an empty string.

    Returns one string if all parts are text, since many chat templates accept no list. Otherwise the parts in the form
    of `ChatPrompt`.
    """
    if content is None or isinstance(content, str):
        return ParsedContent(content or "")
    if not isinstance(content, list):
        raise BadRequest(f"{path} must be a string or a list of parts.", param=path)
    parts: list[dict[str, object]] = []
    reasoning: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and isinstance(kind, str) and kind in _REASONING:
            reasoning.append(_reasoning_text(part, kind))
        else:
            parts.append(_part(part, f"{path}[{index}]"))
    texts = [part["text"] for part in parts if part["type"] == "text"]
    joined = "".join(map(str, texts)) if len(texts) == len(parts) else parts
    return ParsedContent(joined, "".join(reasoning))


def _reasoning_text(part: Part, kind: str) -> str:
    """Sealed reasoning has no text that this server could read."""
    text = part.get(_REASONING[kind])
    return text if isinstance(text, str) else ""


def _part(part: object, path: str) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict):
        kind = part.get("type", "text")
        if isinstance(kind, str) and kind in _TEXTS:
            return {"type": "text", "text": _text(part, _TEXTS[kind], path)}
        if isinstance(kind, str) and kind in _FILES:
            return {"type": "text", "text": text_file(part, path)}
        if isinstance(kind, str) and kind in _MEDIA:
            media = _MEDIA[kind](part, path)
            return {"type": media.kind, "media": media}
        if isinstance(kind, str) and kind in _UNSUPPORTED:
            raise UnsupportedParameter(f"{path} has the type {kind}; {_UNSUPPORTED[kind]}.", param=path)
    raise BadRequest(
        f'{path} must be a part: {{"type": "text", "text": "..."}} or '
        '{"type": "image_url", "image_url": {"url": "..."}}.',
        param=path,
    )


def _text(part: Part, field: str, path: str) -> str:
    text = part.get(field, ...)
    if text is not None and not isinstance(text, str):
        raise BadRequest(f'{path} must be a part, such as {{"type": "text", "text": "..."}}.', param=path)
    return text or ""


def _image(part: Part, path: str) -> MediaPart:
    return MediaPart("image", image_source(part, path), path)


def _video(part: Part, path: str) -> MediaPart:
    return MediaPart("video", url_of(part.get("video_url"), f"{path}.video_url"), path)


def _audio(part: Part, path: str) -> MediaPart:
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


_FILES = ("file", "input_file")
_MEDIA: dict[str, Callable[[Part, str], MediaPart]] = {
    "image_url": _image,
    "input_image": _image,
    "image": _image,
    "input_audio": _audio,
    "video_url": _video,
}

_STRING = {"type": ["string", "null"]}
_SOURCE = {"type": "string", "minLength": 1, "description": "A data URI, an http(s) URL or an allowed file."}
_ADDRESS = {"anyOf": [{"type": "object", "required": ["url"], "properties": {"url": _SOURCE}}, _SOURCE]}
_AUDIO = {
    "type": "object",
    "required": ["data", "format"],
    "properties": {"data": {"type": "string", "description": "Base64."}, "format": {"enum": list(AUDIO_FORMATS)}},
}
_FILE = {
    "type": "object",
    "required": ["file_data"],
    "properties": {"file_data": {"type": "string", "description": "A data URI of a text file."}},
}


def _schema(kind: str, value: object, *, field: str | None = None) -> dict[str, Any]:
    field = field or kind
    required = [field] if kind == "text" else ["type", field]
    return {
        "title": kind,
        "type": "object",
        "required": required,
        "properties": {"type": {"const": kind}, field: value},
    }


def _open_schema(kind: str) -> dict[str, Any]:
    return {"title": kind, "type": "object", "required": ["type"], "properties": {"type": {"const": kind}}}


PART_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"title": "string", "type": "string"},
        *(_schema(kind, _STRING, field=field) for kind, field in _TEXTS.items()),
        *map(_open_schema, _REASONING),
        _schema("image_url", _ADDRESS),
        _schema("input_image", _ADDRESS, field="image_url"),
        _open_schema("image"),
        _schema("video_url", _ADDRESS),
        _schema("input_audio", _AUDIO),
        _schema("file", _FILE),
    ]
}
