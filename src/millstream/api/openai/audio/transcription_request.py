"""Reads requests for transcripts: forms with a file, or JSON with its address."""

from __future__ import annotations

import math
from typing import Literal

from starlette.requests import Request

from millstream.api.body import read_body, validated
from millstream.api.form import is_form, read_form
from millstream.api.openai.audio.languages import language_code
from millstream.api.openai.audio.transcription_schema import IGNORED, UNSUPPORTED, TranscriptionBody
from millstream.api.params import supported
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.speech_types import TranscriptionRequest

Task = Literal["transcribe", "translate"]

_LISTS = frozenset(
    {"timestamp_granularities", "include", "keywords", "languages", "known_speaker_names", "known_speaker_references"}
)
_SCHEMES = (b"http://", b"https://", b"data:", b"file:")


async def read_transcription(request: Request, task: Task) -> tuple[TranscriptionBody, TranscriptionRequest]:
    """Raises `BadRequest` if anything is wrong that can be known without the audio."""
    if not is_form(request):
        body = await read_body(request, _parse)
        return body, transcription_request(body, _address(body), task)
    form = await read_form(request, "file")
    fields, upload = _typed(form.fields), form.file
    if upload is not None and upload.startswith(_SCHEMES):
        fields["file"], upload = _text(upload), None
    body = _parse(fields)
    if upload is None:
        return body, transcription_request(body, _address(body), task)
    if body.url is not None:
        raise BadRequest("file and url are both given; send one.", param="url")
    if not upload:
        raise BadRequest("file is empty. Send an audio file.", param="file")
    return body, transcription_request(body, upload, task)


def transcription_request(body: TranscriptionBody, audio: bytes | str, task: Task) -> TranscriptionRequest:
    return TranscriptionRequest(
        body.model,
        audio,
        task=task,
        language=_language(body),
        prompt=_prompt(body),
        temperature=body.temperature or None,
        words=body.response_format == "verbose_json" and "word" in (body.timestamp_granularities or ()),
    )


def _parse(values: dict[str, object]) -> TranscriptionBody:
    body = validated(TranscriptionBody, supported(values, TranscriptionBody.model_fields, UNSUPPORTED, IGNORED))
    if body.stream and body.response_format in ("srt", "vtt"):
        raise UnsupportedParameter(
            f"response_format {body.response_format} cannot be streamed. Leave stream out, or send json, text or "
            "verbose_json.",
            param="stream",
        )
    return body


def _address(body: TranscriptionBody) -> str:
    if body.file is not None and body.url is not None:
        raise BadRequest("file and url are both given; send one.", param="url")
    address = body.file or body.url
    if address is None:
        raise BadRequest(
            "file is required: upload it as a part of multipart/form-data, or send its address (an http:// or https:// "
            "URL or a data URI) as JSON.",
            param="file",
        )
    return address


def _language(body: TranscriptionBody) -> str | None:
    codes = [language_code(each) for each in body.languages or ()]
    return body.language or (codes[0] if len(codes) == 1 else None)


def _prompt(body: TranscriptionBody) -> str | None:
    parts = [(body.prompt or "").strip(), ", ".join(body.keywords or ())]
    return " ".join(part for part in parts if part) or None


def _typed(fields: dict[str, str | list[str]]) -> dict[str, object]:
    """Texts of a form as the values that JSON would have. An empty text means "not given"."""
    values: dict[str, object] = {}
    for name, value in fields.items():
        name = name.partition("[")[0]  # chunking_strategy[type]
        if value in ("", []):
            continue
        if name in _LISTS:
            values[name] = value if isinstance(value, list) else [part.strip() for part in value.split(",")]
        elif isinstance(value, list):
            values[name] = value[-1]
        else:
            values[name] = _typed_value(name, value)
    return values


def _typed_value(name: str, value: str) -> object:
    if name == "stream":
        return {"true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)
    if name == "temperature":
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def _text(upload: bytes) -> str:
    try:
        return upload.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise BadRequest("file is neither an audio file nor a URL.", param="file") from error
