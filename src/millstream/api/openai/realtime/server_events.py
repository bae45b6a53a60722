"""Events of a session as JSON: names and fields of today's API, and of its beta."""

from __future__ import annotations

import base64
import itertools
import secrets
from dataclasses import fields as fields_of
from typing import Any

from millstream import realtime_types as types
from millstream.api.openai.realtime.objects import (
    error_object,
    item_object,
    part_object,
    response_object,
    session_object,
)
from millstream.exact_json import dumps
from millstream.realtime_types import ServerEvent

_TRANSCRIPT = "conversation.item.input_audio_transcription"

NAMES: dict[type, tuple[str, str | None]] = {
    types.SessionCreated: ("session.created", "session.created"),
    types.SessionUpdated: ("session.updated", "session.updated"),
    types.SpeechStarted: ("input_audio_buffer.speech_started", "input_audio_buffer.speech_started"),
    types.SpeechStopped: ("input_audio_buffer.speech_stopped", "input_audio_buffer.speech_stopped"),
    types.BufferCommitted: ("input_audio_buffer.committed", "input_audio_buffer.committed"),
    types.BufferCleared: ("input_audio_buffer.cleared", "input_audio_buffer.cleared"),
    types.ItemAdded: ("conversation.item.added", "conversation.item.created"),
    types.ItemDone: ("conversation.item.done", None),
    types.ItemDeleted: ("conversation.item.deleted", "conversation.item.deleted"),
    types.ItemTruncated: ("conversation.item.truncated", "conversation.item.truncated"),
    types.ItemRetrieved: ("conversation.item.retrieved", "conversation.item.retrieved"),
    types.InputTranscriptDelta: (f"{_TRANSCRIPT}.delta", f"{_TRANSCRIPT}.delta"),
    types.InputTranscriptCompleted: (f"{_TRANSCRIPT}.completed", f"{_TRANSCRIPT}.completed"),
    types.InputTranscriptFailed: (f"{_TRANSCRIPT}.failed", f"{_TRANSCRIPT}.failed"),
    types.ResponseCreated: ("response.created", "response.created"),
    types.ResponseDone: ("response.done", "response.done"),
    types.OutputItemAdded: ("response.output_item.added", "response.output_item.added"),
    types.OutputItemDone: ("response.output_item.done", "response.output_item.done"),
    types.PartAdded: ("response.content_part.added", "response.content_part.added"),
    types.PartDone: ("response.content_part.done", "response.content_part.done"),
    types.TextDelta: ("response.output_text.delta", "response.text.delta"),
    types.TextDone: ("response.output_text.done", "response.text.done"),
    types.SpokenTextDelta: ("response.output_audio_transcript.delta", "response.audio_transcript.delta"),
    types.SpokenTextDone: ("response.output_audio_transcript.done", "response.audio_transcript.done"),
    types.AudioDelta: ("response.output_audio.delta", "response.audio.delta"),
    types.AudioDone: ("response.output_audio.done", "response.audio.done"),
    types.ArgumentsDelta: ("response.function_call_arguments.delta", "response.function_call_arguments.delta"),
    types.ArgumentsDone: ("response.function_call_arguments.done", "response.function_call_arguments.done"),
    types.SessionError: ("error", "error"),
}
"""The name of each event, today and in the beta. None: the beta has no such event."""

_BETA_TRANSCRIPTION = {"session.created": "transcription_session.created"}
_BETA_TRANSCRIPTION |= {"session.updated": "transcription_session.updated"}


class EventRenderer:
    """Renders the events of one session."""

    def __init__(self, *, beta: bool) -> None:
        self._beta = beta
        self._conversation_id = f"conv_{secrets.token_hex(12)}"
        self._start = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    def render(self, event: ServerEvent) -> str | None:
        """None if this client's version of the API has no such event."""
        name = NAMES[type(event)][1 if self._beta else 0]
        if name is None:
            return None
        if self._beta and isinstance(event, types.SessionCreated | types.SessionUpdated):
            name = _BETA_TRANSCRIPTION[name] if event.session.kind == "transcription" else name
        value = {"type": name, "event_id": f"event_{self._start}{next(self._numbers):06x}", **self._fields(event)}
        return dumps(value).decode()

    def _fields(self, event: ServerEvent) -> dict[str, Any]:
        match event:
            case types.SessionCreated() | types.SessionUpdated():
                return {"session": session_object(event.session, event.session_id, beta=self._beta)}
            case types.InputTranscriptCompleted():
                usage = {"type": "duration", "seconds": event.seconds}
                return {
                    "item_id": event.item_id,
                    "content_index": event.content_index,
                    "transcript": event.transcript,
                    "usage": usage,
                }
            case types.AudioDelta():
                return {**_plain(event.at), "delta": base64.b64encode(event.audio).decode()}
            case types.SessionError():
                return {"error": error_object(event.error, event.event_id)}
        found: dict[str, Any] = {}
        for field in fields_of(event):
            found |= self._field(field.name, getattr(event, field.name))
        return found

    def _field(self, name: str, value: Any) -> dict[str, Any]:
        match value:
            case types.Place():
                return _plain(value)
            case types.Item():
                return {name: item_object(value, beta=self._beta)}
            case types.Part():
                return {name: part_object(value)}
            case types.Response():
                return {name: response_object(value, self._conversation_id, beta=self._beta)}
            case Exception():
                error = error_object(value)  # type: ignore[arg-type]
                return {name: {key: error[key] for key in ("type", "code", "message", "param")}}
        return {name: value}


def _plain(place: types.Place) -> dict[str, Any]:
    return {
        "response_id": place.response_id,
        "item_id": place.item_id,
        "output_index": place.output_index,
        "content_index": place.content_index,
    }
