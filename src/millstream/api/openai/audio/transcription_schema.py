"""Requests and responses of POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.openai.audio.languages import language_code
from millstream.api.request_docs import Schema, complete_body
from millstream.api.response_schema import ABSENT, ResponseSchema
from millstream.errors import BadRequest, UnsupportedParameter

MAX_PROMPT = 65_536
"""Characters. Models take the last few hundred tokens of it."""
MAX_LISTED = 1_000
"""Keywords, or languages."""

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "include": ([],),
    "known_speaker_names": ([],),
    "known_speaker_references": ([],),
    "hotwords": ("",),
    "diarize": (False,),
}
IGNORED = (
    "chunking_strategy",
    "enable_timestamps",
    "metadata",
    "priority",
    "seed",
    "store",
    "stream_options",
    "user",
    "vad_filter",
)


def _format(value: object) -> str:
    if value == "diarized_json":
        raise UnsupportedParameter(
            "response_format diarized_json is not supported: the models of this server do not tell speakers apart. "
            "Send verbose_json for segments with times.",
            param="response_format",
        )
    if value not in FORMATS:
        raise BadRequest(f"response_format must be one of {', '.join(FORMATS)}.", param="response_format")
    return str(value)


def _language(value: object) -> str | None:
    if not isinstance(value, str):
        raise BadRequest("language must be a code of two or three letters, such as en or de.", param="language")
    if value.strip().lower() in ("", "auto"):
        return None
    return language_code(value)


def _source(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(
            "file must be the address of an audio file (an http:// or https:// URL or a data URI), or be uploaded as a "
            "part of multipart/form-data.",
            param="file",
        )
    return value


def _complete(schema: Schema) -> None:
    complete_body(schema, UNSUPPORTED, IGNORED)


_ADDRESS: Schema = {"type": "string", "minLength": 1}
Source = Annotated[str | None, PlainValidator(_source), WithJsonSchema(_ADDRESS)]
Texts = Annotated[list[str], Field(max_length=MAX_LISTED)]


class TranscriptionBody(BaseModel):
    """Audio to transcribe. The same fields are accepted in JSON and in a form."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=_complete)

    file: Source = None
    """The audio. In a form: the file itself. In JSON: its address, an http(s) URL or a data URI. WAV, MP3, M4A, AAC,
    FLAC, Ogg, Opus, WebM, MP4."""
    url: Source = None
    """The address of the audio, in place of `file`."""
    model: str = ""
    """The model's id or alias, as listed by /v1/models. Default: the server's first transcription model."""
    language: Annotated[str | None, PlainValidator(_language), WithJsonSchema({"type": "string"})] = None
    """The language that is spoken, such as `en`. Default: the model finds out."""
    languages: Texts | None = None
    """Languages that may be spoken. One: the same as language. Several: the model finds out."""
    prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | None = None
    """Text that came before, or names to expect. It steers spelling and style."""
    keywords: Texts | None = None
    """Words to expect; added to the prompt."""
    response_format: Annotated[
        TranscriptFormat, PlainValidator(_format), WithJsonSchema({"type": "string", "enum": list(FORMATS)})
    ] = "json"
    """`verbose_json` has segments with times, and words with times if timestamp_granularities asks for them."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    """0, the default: greedy, and higher ones only where the result looks wrong."""
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    """What `verbose_json` has times for. Default: segments."""
    stream: bool = False
    """Send the text as server-sent events while it is recognised. Not with `srt` and `vtt`."""


class DurationUsage(ResponseSchema):
    type: Literal["duration"]
    seconds: float
    """Of audio."""


class TokenUsage(ResponseSchema):
    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpokenLanguage(ResponseSchema):
    code: str


class Transcript(ResponseSchema):
    text: str
    languages: list[SpokenLanguage] = ABSENT
    """If it is known."""
    usage: DurationUsage


class TranscriptSegment(ResponseSchema):
    id: int
    seek: int
    """The begin of the segment, in hundredths of a second."""
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptWord(ResponseSchema):
    word: str
    start: float
    end: float


class VerboseTranscript(ResponseSchema):
    task: Literal["transcribe", "translate"]
    language: str
    """Its English name; of a translation, `english`. Empty if it is not known."""
    duration: float
    text: str
    segments: list[TranscriptSegment] = ABSENT
    words: list[TranscriptWord] = ABSENT
    usage: DurationUsage


class TranscriptTextDelta(ResponseSchema):
    type: Literal["transcript.text.delta"]
    delta: str


class TranscriptTextSegment(ResponseSchema):
    """With `verbose_json` only, after the delta with its text."""

    type: Literal["transcript.text.segment"]
    id: str
    start: float
    end: float
    text: str
    speaker: str
    """Always empty: speakers are not told apart."""


class TranscriptTextDone(ResponseSchema):
    type: Literal["transcript.text.done"]
    text: str
    """All deltas, joined."""
    languages: list[SpokenLanguage] = ABSENT
    usage: TokenUsage


EVENTS = (TranscriptTextDelta, TranscriptTextSegment, TranscriptTextDone)
MODELS = (Transcript, VerboseTranscript, *EVENTS)

EXAMPLES: dict[str, Any] = {
    "url": {
        "summary": "A file on the web",
        "value": {"file": "https://example.com/talk.mp3", "response_format": "verbose_json"},
    },
    "data": {
        "summary": "A data URI, streamed",
        "value": {
            "file": "data:audio/wav;base64,UklGRiYAAABXQVZFZm10IBAAAAABAAEAgD4AAAB9AAACABAAZGF0YQIAAAAAAA==",
            "stream": True,
        },
    },
}
