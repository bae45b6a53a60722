"""Realtime sessions, in plain data: their settings, the items of their conversation, and the events that they send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from millstream.errors import MillstreamError
from millstream.types import MediaPart, ToolUse, Usage

Encoding = Literal["pcm16", "g711_ulaw", "g711_alaw"]
SessionKind = Literal["realtime", "transcription"]
Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]

EAGERNESS_MS = {"low": 1200, "medium": 700, "high": 400, "auto": 700}
"""What `semantic_vad` means here: how long a pause ends a phrase. No model guesses whether the person has finished."""


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """Mono audio on the wire."""

    encoding: Encoding = "pcm16"
    rate: int = 24_000
    """Samples per second. 8,000 for G.711."""


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """How the server finds phrases in the audio that arrives."""

    threshold: float = 0.5
    """From 0 to 1. Higher: only louder or clearer speech counts."""
    prefix_padding_ms: int = 300
    """Audio before the detected begin that belongs to the phrase."""
    silence_duration_ms: int = 500
    """Silence that ends a phrase."""
    eagerness: str | None = None
    """With `semantic_vad`: what the client chose. None: `server_vad`."""
    create_response: bool = True
    """Respond to each phrase."""
    interrupt_response: bool = True
    """A phrase that begins cancels the response that runs."""

    @property
    def pause_ms(self) -> int:
        return self.silence_duration_ms if self.eagerness is None else EAGERNESS_MS[self.eagerness]


@dataclass(frozen=True, slots=True)
class InputTranscription:
    model: str = ""
    """"" for the first transcription model that is served."""
    language: str | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """The settings of a session. A response may change some of them for itself."""

    kind: SessionKind = "realtime"
    model: str = ""
    """The chat model; "" for the default one."""
    instructions: str = ""
    speaks: bool = True
    """Responses are spoken. False: text only."""
    input_format: AudioFormat = AudioFormat()
    output_format: AudioFormat = AudioFormat()
    transcription: InputTranscription | None = None
    """None: conversations transcribe all the same, since their model reads text, but send no events of it."""
    transcriber: str = ""
    """The name of the model that transcribes, as the server resolved it; "" if none is served."""
    turn_detection: TurnDetection | None = TurnDetection()
    """None: the client commits the audio."""
    speech_model: str = ""
    """"" for the first speech model that is served."""
    voice: str | None = None
    speed: float = 1.0
    tools: tuple[dict[str, Any], ...] = ()
    """In the form of `ToolUse.tools`."""
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    """The function that must be called, with `required`."""
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    effort: str | None = None
    """How much the model should reason; None for its default."""
    truncates: bool = True
    """Leave the oldest items out of a prompt that is too long."""

    @property
    def tool_use(self) -> ToolUse | None:
        if not self.tools:
            return None
        return ToolUse(self.tools, self.tool_choice, self.tool_name, self.parallel_tool_calls)


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """A key that opens sessions with these settings, for a short time."""

    value: str = field(repr=False)
    expires_at: int
    """In seconds since 1970."""
    config: SessionConfig


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message."""

    kind: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
    text: str | None = None
    """The text, or the transcript of audio. None for audio that is not transcribed yet."""
    audio: bytes = field(default=b"", repr=False)
    """Of a new item: audio in the session's input format, to be transcribed."""
    media: MediaPart | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a conversation: a message, a call of a function, or its output."""

    id: str
    kind: Literal["message", "function_call", "function_call_output"] = "message"
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    role: Literal["system", "user", "assistant"] = "user"
    parts: tuple[Part, ...] = ()
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str = ""


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What a client asks of one response."""

    config: SessionConfig
    input: tuple[Item, ...] | None = None
    """Respond to these items. None: to the conversation."""
    in_conversation: bool = True
    """Add the output to the conversation."""
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """A response as events show it."""

    id: str
    options: ResponseOptions
    status: Status = "in_progress"
    reason: str | None = None
    """Why it was cancelled or is incomplete."""
    error: MillstreamError | None = None
    output: tuple[Item, ...] = ()
    usage: Usage | None = None


# Events that a session sends. Field names are those of the JSON objects.


@dataclass(frozen=True, slots=True)
class SessionCreated:
    session_id: str
    session: SessionConfig


@dataclass(frozen=True, slots=True)
class SessionUpdated:
    session_id: str
    session: SessionConfig


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    item_id: str
    """Of the item that the phrase will be."""
    audio_start_ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    item_id: str
    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class BufferCommitted:
    item_id: str
    previous_item_id: str | None


@dataclass(frozen=True, slots=True)
class BufferCleared:
    pass


@dataclass(frozen=True, slots=True)
class ItemAdded:
    item: Item
    previous_item_id: str | None


@dataclass(frozen=True, slots=True)
class ItemDone:
    item: Item
    previous_item_id: str | None


@dataclass(frozen=True, slots=True)
class ItemDeleted:
    item_id: str


@dataclass(frozen=True, slots=True)
class ItemTruncated:
    item_id: str
    content_index: int
    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class ItemRetrieved:
    item: Item


@dataclass(frozen=True, slots=True)
class InputTranscriptDelta:
    item_id: str
    delta: str
    content_index: int = 0


@dataclass(frozen=True, slots=True)
class InputTranscriptCompleted:
    item_id: str
    transcript: str
    seconds: float
    content_index: int = 0


@dataclass(frozen=True, slots=True)
class InputTranscriptFailed:
    item_id: str
    error: MillstreamError
    content_index: int = 0


@dataclass(frozen=True, slots=True)
class ResponseCreated:
    response: Response


@dataclass(frozen=True, slots=True)
class ResponseDone:
    response: Response


@dataclass(frozen=True, slots=True)
class OutputItemAdded:
    response_id: str
    output_index: int
    item: Item


@dataclass(frozen=True, slots=True)
class OutputItemDone:
    response_id: str
    output_index: int
    item: Item


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a response an event belongs."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int = 0


@dataclass(frozen=True, slots=True)
class PartAdded:
    at: Place
    part: Part


@dataclass(frozen=True, slots=True)
class PartDone:
    at: Place
    part: Part


@dataclass(frozen=True, slots=True)
class TextDelta:
    at: Place
    delta: str


@dataclass(frozen=True, slots=True)
class TextDone:
    at: Place
    text: str


@dataclass(frozen=True, slots=True)
class SpokenTextDelta:
    """Text of a spoken response. It comes before its audio."""

    at: Place
    delta: str


@dataclass(frozen=True, slots=True)
class SpokenTextDone:
    at: Place
    transcript: str


@dataclass(frozen=True, slots=True)
class AudioDelta:
    at: Place
    audio: bytes
    """In the session's output format."""


@dataclass(frozen=True, slots=True)
class AudioDone:
    at: Place


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    at: Place
    call_id: str
    delta: str


@dataclass(frozen=True, slots=True)
class ArgumentsDone:
    at: Place
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class SessionError:
    """Something failed that no response and no transcript stands for. The session goes on."""

    error: MillstreamError
    event_id: str | None = None
    """The client's event that was wrong."""


ServerEvent = (
    SessionCreated
    | SessionUpdated
    | SpeechStarted
    | SpeechStopped
    | BufferCommitted
    | BufferCleared
    | ItemAdded
    | ItemDone
    | ItemDeleted
    | ItemTruncated
    | ItemRetrieved
    | InputTranscriptDelta
    | InputTranscriptCompleted
    | InputTranscriptFailed
    | ResponseCreated
    | ResponseDone
    | OutputItemAdded
    | OutputItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | SpokenTextDelta
    | SpokenTextDone
    | AudioDelta
    | AudioDone
    | ArgumentsDelta
    | ArgumentsDone
    | SessionError
)
