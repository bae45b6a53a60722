"""Parses the settings of a session, in the shape of today's API and in that of its beta, into one form.

Only what an update sends is changed. Both shapes are read wherever they come: the names of one mean nothing in the
other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from millstream.api.efforts import EFFORTS
from millstream.api.openai.realtime.fields import MISSING, Fields
from millstream.api.openai.tools import Choice, ToolSet, parse_choice, parse_tools, tool_use
from millstream.api.params import supported
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.realtime_types import (
    EAGERNESS_MS,
    AudioFormat,
    Encoding,
    InputTranscription,
    SessionConfig,
    TurnDetection,
)

RATES = (8_000, 16_000, 24_000, 48_000)
"""Of PCM. OpenAI's own API takes 24,000."""
FORMATS: dict[str, Encoding] = {"audio/pcm": "pcm16", "audio/pcmu": "g711_ulaw", "audio/pcma": "g711_alaw"}
BETA_FORMATS: tuple[Encoding, ...] = ("pcm16", "g711_ulaw", "g711_alaw")
MAX_TOKENS = 1_000_000
NO_LIMIT = "inf"

_KNOWN = (
    "type", "model", "instructions", "output_modalities", "modalities", "audio", "voice", "speed",
    "input_audio_format", "output_audio_format", "input_audio_transcription", "turn_detection", "tools",
    "tool_choice", "parallel_tool_calls", "max_output_tokens", "max_response_output_tokens", "temperature",
    "reasoning", "truncation",
)  # fmt: skip
_IGNORED = (
    "id", "object", "expires_at", "client_secret", "include", "tracing", "noise_reduction",
    "input_audio_noise_reduction", "metadata", "conversation", "input", "client_secret_expires_after",
)  # fmt: skip


def update_session(config: SessionConfig, value: object, path: str = "session") -> SessionConfig:
    """Returns the settings with what an event changes. Raises `BadRequest`, and then nothing is changed."""
    fields = Fields.of(value, path)
    supported(cast(dict[str, object], value), _KNOWN, {"prompt": ()}, _IGNORED, prefix=f"{path}." if path else "")
    kind = fields.one_of("type", ("realtime", "transcription"))
    changes: dict[str, Any] = {} if kind is None else {"kind": kind}
    _take(changes, "model", fields.text("model"))
    _take(changes, "instructions", fields.text("instructions"))
    _take(changes, "speaks", _speaks(fields))
    _take(changes, "temperature", fields.number("temperature", 0, 2))
    _take(changes, "parallel_tool_calls", fields.flag("parallel_tool_calls"))
    changes |= _limit(fields) | _tools(config, fields) | _truncation(fields)
    if (reasoning := fields.inner("reasoning")) is not None:
        _take(changes, "effort", reasoning.one_of("effort", tuple(EFFORTS)))
    changes |= _input(config, fields, beta=True) | _output(fields, beta=True)
    if (audio := fields.inner("audio")) is not None:
        if (part := audio.inner("input")) is not None:
            changes |= _input(config, part, beta=False)
        if (part := audio.inner("output")) is not None:
            changes |= _output(part, beta=False)
    return replace(config, **changes)


def _take(changes: dict[str, Any], name: str, value: object) -> None:
    if value is not None:
        changes[name] = value


def _speaks(fields: Fields) -> bool | None:
    name = "output_modalities" if "output_modalities" in fields else "modalities"
    values = fields.list(name)
    if values is None:
        return None
    if not values or not all(value in ("text", "audio") for value in values):
        raise BadRequest(f'{fields.at(name)} must be ["audio"] or ["text"].', param=fields.at(name))
    return "audio" in values


def _limit(fields: Fields) -> dict[str, Any]:
    for name in ("max_output_tokens", "max_response_output_tokens"):
        if fields.raw(name) == NO_LIMIT:
            return {"max_output_tokens": None}
        if (limit := fields.whole(name, 1, MAX_TOKENS)) is not None:
            return {"max_output_tokens": limit}
    return {}


def _tools(config: SessionConfig, fields: Fields) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    tools = config.tools
    if fields.list("tools") is not None:
        parsed = parse_tools(fields.raw("tools"))
        if parsed.custom:
            raise UnsupportedParameter("Custom tools are not supported here: send functions.", param=fields.at("tools"))
        tools = changes["tools"] = parsed.tools
    choice = Choice(config.tool_choice, config.tool_name)
    if fields.raw("tool_choice") not in (MISSING, None):
        choice = parse_choice(fields.raw("tool_choice"))
    elif choice.name not in (None, *(tool["function"]["name"] for tool in tools)):
        choice = Choice()
    tool_use(ToolSet(tools), choice, None, param=fields.at("tool_choice"))
    return changes | {"tool_choice": choice.mode, "tool_name": choice.name}


def _truncation(fields: Fields) -> dict[str, Any]:
    value = fields.raw("truncation")
    if value in (MISSING, None):
        return {}
    if value not in ("auto", "disabled") and not isinstance(value, dict):
        raise BadRequest(f"{fields.at('truncation')} must be auto or disabled.", param=fields.at("truncation"))
    return {"truncates": value != "disabled"}


def _input(config: SessionConfig, fields: Fields, *, beta: bool) -> dict[str, Any]:
    """How audio comes in."""
    changes: dict[str, Any] = {}
    _take(changes, "input_format", _format(fields, "input_audio_format" if beta else "format", config.input_format))
    name = "input_audio_transcription" if beta else "transcription"
    if fields.raw(name) is not MISSING:
        changes["transcription"] = _transcription(config.transcription, fields.inner(name))
    if fields.raw("turn_detection") is not MISSING:
        changes["turn_detection"] = _turns(config.turn_detection, fields.inner("turn_detection"))
    return changes


def _output(fields: Fields, *, beta: bool) -> dict[str, Any]:
    """How answers are spoken. `model` is ours: which speech model speaks."""
    changes: dict[str, Any] = {}
    _take(changes, "output_format", _format(fields, "output_audio_format" if beta else "format", AudioFormat()))
    voice = fields.raw("voice")
    if isinstance(voice, dict):
        voice = voice.get("id") or voice.get("name")
    if voice not in (MISSING, None):
        if not isinstance(voice, str):
            raise BadRequest(f"{fields.at('voice')} must be the name of a voice.", param=fields.at("voice"))
        changes["voice"] = voice
    _take(changes, "speed", fields.number("speed", 0.25, 4))
    if not beta:
        _take(changes, "speech_model", fields.text("model"))
    return changes


def _format(fields: Fields, name: str, now: AudioFormat) -> AudioFormat | None:
    value = fields.raw(name)
    if value in (MISSING, None):
        return None
    path = fields.at(name)
    if isinstance(value, str):
        if value not in BETA_FORMATS:
            raise BadRequest(f"{path} must be one of {', '.join(BETA_FORMATS)}.", param=path)
        return AudioFormat(value, 24_000 if value == "pcm16" else 8_000)
    inner = Fields.of(value, path)
    encoding = FORMATS[inner.one_of("type", tuple(FORMATS)) or "audio/pcm"]
    if encoding != "pcm16":
        return AudioFormat(encoding, 8_000)
    rate = inner.whole("rate", 1, 192_000) or (now.rate if now.encoding == "pcm16" else 24_000)
    if rate not in RATES:
        shown = ", ".join(map(str, RATES))
        raise BadRequest(f"{path}.rate must be one of {shown}, but {rate} was sent.", param=f"{path}.rate")
    return AudioFormat("pcm16", rate)


def _transcription(now: InputTranscription | None, fields: Fields | None) -> InputTranscription | None:
    if fields is None:
        return None
    changes: dict[str, Any] = {}
    for name in ("model", "language", "prompt"):
        if fields.raw(name) is not MISSING:
            changes[name] = fields.text(name) or ("" if name == "model" else None)
    return replace(now or InputTranscription(), **changes)


def _turns(now: TurnDetection | None, fields: Fields | None) -> TurnDetection | None:
    if fields is None or fields.raw("type") == "none":
        return None
    kind = fields.one_of("type", ("server_vad", "semantic_vad"))
    if fields.raw("idle_timeout_ms") not in (MISSING, None):
        path = fields.at("idle_timeout_ms")
        raise UnsupportedParameter(f"{path} is not supported: send response.create instead.", param=path)
    now = now or TurnDetection()
    changes: dict[str, Any] = {}
    _take(changes, "threshold", fields.number("threshold", 0, 1))
    _take(changes, "prefix_padding_ms", fields.whole("prefix_padding_ms", 0, 5_000))
    _take(changes, "silence_duration_ms", fields.whole("silence_duration_ms", 50, 10_000))
    _take(changes, "create_response", fields.flag("create_response"))
    _take(changes, "interrupt_response", fields.flag("interrupt_response"))
    if kind == "semantic_vad":
        changes["eagerness"] = fields.one_of("eagerness", tuple(EAGERNESS_MS)) or now.eagerness or "auto"
    elif kind == "server_vad":
        changes["eagerness"] = None
    return replace(now, **changes)
