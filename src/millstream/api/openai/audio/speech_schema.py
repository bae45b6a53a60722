"""Requests and responses of POST /v1/audio/speech, GET /v1/audio/voices and GET /v1/audio/models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.request_docs import Schema, complete_body
from millstream.api.response_schema import ABSENT, ResponseSchema
from millstream.errors import BadRequest
from millstream.media.audio_encoding import AudioFormat

MAX_INPUT = 65_536
"""Characters: more than an hour of speech."""
MAX_NAME = 512
"""Characters of a voice, which may be a mix of several."""
MAX_INSTRUCTIONS = 4_096

_INPUT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_INPUT}
_NAME: Schema = {"type": "string", "maxLength": MAX_NAME}
_VOICE: Schema = {
    "anyOf": [
        _NAME,
        {"type": "object", "required": ["id"], "properties": {"id": _NAME}},
        {"type": "object", "required": ["name"], "properties": {"name": _NAME}},
    ]
}

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # What other servers have, and what would change the sound
    "gender": (),
    "max_tokens": (),
    "normalization_options": ({},),
    "pitch": (0, 1),
    "ref_audio": (),
    "ref_text": (),
    "repetition_penalty": (),
    "return_download_link": (False,),
    "return_timestamps": (False,),
    "temperature": (),
    "top_k": (),
    "top_p": (),
    "volume_multiplier": (1,),
}
IGNORED = ("user", "metadata", "safety_identifier", "store", "priority", "seed", "streaming_interval", "verbose")


def _input(value: object) -> str:
    if not isinstance(value, str):
        raise BadRequest("input must be a string: the text to speak.", param="input")
    if not value.strip():
        raise BadRequest("input is empty. Send the text to speak.", param="input")
    if len(value) > MAX_INPUT:
        raise BadRequest(
            f"input has {len(value)} characters; at most {MAX_INPUT} are allowed. Send it in parts.", param="input"
        )
    return value


def _voice(value: object) -> str | None:
    match value:
        case str(name) | {"id": str(name)} | {"name": str(name)}:
            if len(name) > MAX_NAME:
                raise BadRequest(f"voice has {len(name)} characters; at most {MAX_NAME} are allowed.", param="voice")
            return name.strip() or None
        case _:
            raise BadRequest('voice must be the name of a voice, or an object like {"id": "..."}.', param="voice")


def _complete(schema: Schema) -> None:
    complete_body(schema, UNSUPPORTED, IGNORED)


class SpeechBody(BaseModel):
    """A text to speak."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=_complete)

    model: str = ""
    """The model's id or alias, as listed by /v1/models. Default: the server's first speech model."""
    input: Annotated[str, PlainValidator(_input), WithJsonSchema(_INPUT)]
    """The text to speak."""
    voice: Annotated[str | None, PlainValidator(_voice), WithJsonSchema(_VOICE)] = None
    """The name of a voice, or an object with its `id` or `name`. /v1/audio/voices lists them. Default: the model's."""
    response_format: AudioFormat = "mp3"
    """`wav` and `pcm` (24 kHz, 16 bits, mono, little-endian, no header) need no extra package on the server."""
    speed: Annotated[float, Field(ge=0.25, le=4.0)] = 1.0
    """1 is the voice's own speed, 2 is twice as fast."""
    language: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    """The language of the text. Default: that of the voice."""
    lang_code: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    """The same as language, as other servers call it."""
    instructions: Annotated[str, Field(max_length=MAX_INSTRUCTIONS)] | None = None
    """How to speak, for models that take it."""
    stream_format: Literal["audio", "sse"] = "audio"
    """`audio`: the bytes of the file. `sse`: server-sent events with the same bytes in base64."""
    stream: bool = True
    """False: send nothing before the speech is complete. The file then has the right length in its header."""


class SpeechUsage(ResponseSchema):
    input_tokens: int
    """Tokens of the text; phonemes, for models that read those."""
    output_tokens: int
    total_tokens: int


class SpeechAudioDelta(ResponseSchema):
    type: Literal["speech.audio.delta"]
    audio: str
    """The next bytes of the file, in base64."""


class SpeechAudioDone(ResponseSchema):
    type: Literal["speech.audio.done"]
    usage: SpeechUsage


class VoiceObject(ResponseSchema):
    id: str
    """What to send as `voice`."""
    name: str
    object: Literal["voice"]
    language: str | None = ABSENT
    gender: str | None = ABSENT


class VoiceList(ResponseSchema):
    voices: list[VoiceObject]
    """The default voice first."""


class SpeechModelObject(ResponseSchema):
    id: str
    name: str


class SpeechModelList(ResponseSchema):
    models: list[SpeechModelObject]


MODELS = (SpeechAudioDelta, SpeechAudioDone, VoiceList, SpeechModelList)

EXAMPLES: dict[str, Any] = {
    "file": {"summary": "A WAV file", "value": {"input": "The mill stands by the stream.", "response_format": "wav"}},
    "events": {
        "summary": "Events with raw samples",
        "value": {"input": "Water drives the wheel.", "response_format": "pcm", "stream_format": "sse"},
    },
}
