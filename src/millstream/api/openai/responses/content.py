"""Parses the content of messages and tool outputs: text, images, audio, and files that are text."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping

from millstream.api.openai.parts import Content
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.types import MediaPart

Part = dict[str, object]

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
AUDIO_FORMATS = ("wav", "mp3")


def parse_content(value: object, path: str) -> Content:
    """Returns one string if all parts are text, since many chat templates accept no list."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if not isinstance(value, list):
        raise BadRequest(f"{path} must be a string or a list of parts.", param=path)
    parts = [_part(part, f"{path}[{index}]") for index, part in enumerate(value)]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "".join(map(str, texts)) if len(texts) == len(parts) else parts


def parse_text(value: object, path: str) -> str:
    """The content of an assistant message, which is text."""
    content = parse_content(value, path)
    if not isinstance(content, str):
        raise BadRequest(f"{path} must be text: the model has no other output.", param=path)
    return content


def _part(part: object, path: str) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise BadRequest(f'{path} must be a part, such as {{"type": "input_text", "text": "..."}}.', param=path)
    if kind in _TEXTS:
        return _text(part.get("text"), f"{path}.text")
    if kind == "refusal":
        return _text(part.get("refusal"), f"{path}.refusal")
    if kind in _MEDIA:
        return _MEDIA[kind](part, path)
    raise UnsupportedParameter(
        f"{path}.type is {kind[:40]!r}. Supported are input_text, input_image, input_file, input_audio, output_text "
        "and refusal.",
        param=f"{path}.type",
    )


def _text(text: object, path: str) -> Part:
    if not isinstance(text, str):
        raise BadRequest(f"{path} must be a string.", param=path)
    return {"type": "text", "text": text}


def _image(part: Mapping[str, object], path: str) -> Part:
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    if url is None and part.get("file_id") is not None:
        raise UnsupportedParameter(
            f"{path}.file_id is not supported: this server stores no files. Send the image as a data URI in image_url.",
            param=f"{path}.file_id",
        )
    if not isinstance(url, str) or not url:
        raise BadRequest(f"{path}.image_url must be an http(s) URL or a data URI.", param=f"{path}.image_url")
    return {"type": "image", "media": MediaPart("image", url, path)}


def _audio(part: Mapping[str, object], path: str) -> Part:
    value = part.get("input_audio")
    audio = value if isinstance(value, dict) else {}
    data, file_format = audio.get("data"), audio.get("format")
    if not isinstance(data, str) or file_format not in AUDIO_FORMATS:
        raise BadRequest(
            f'{path}.input_audio must be {{"data": "...", "format": "wav"}}, with the file in base64. The format is '
            f"{' or '.join(AUDIO_FORMATS)}.",
            param=f"{path}.input_audio",
        )
    return {"type": "audio", "media": MediaPart("audio", f"data:audio/{file_format};base64,{data}", path)}


def _file(part: Mapping[str, object], path: str) -> Part:
    """A file counts as its text, under its name."""
    for field in ("file_id", "file_url"):
        if part.get(field) is not None and part.get("file_data") is None:
            raise UnsupportedParameter(
                f"{path}.{field} is not supported. Send a text file in file_data, as a data URI or base64.",
                param=f"{path}.{field}",
            )
    data, name = part.get("file_data"), part.get("filename")
    if not isinstance(data, str) or not isinstance(name, str | None):
        raise BadRequest(f"{path}.file_data must be a data URI or base64.", param=f"{path}.file_data")
    text = _file_text(data)
    if text is None:
        raise UnsupportedParameter(
            f"{path}.file_data is not a text file in UTF-8. Other files, such as PDF, are not supported: send their "
            "text, or their pages as images.",
            param=f"{path}.file_data",
        )
    return {"type": "text", "text": f"{name}:\n{text}\n" if name else text}


def _file_text(data: str) -> str | None:
    encoded = data.partition(",")[2] if data.startswith("data:") else data
    try:
        raw = base64.b64decode(encoded, validate=True)
        text = raw.decode()
    except (binascii.Error, ValueError):
        return None
    return None if "\0" in text else text


_MEDIA: dict[str, Callable[[Mapping[str, object], str], Part]] = {
    "input_image": _image,
    "input_audio": _audio,
    "input_file": _file,
}
