"""Items, responses and sessions as JSON objects, in the shape of today's API and in that of its beta."""

from __future__ import annotations

from typing import Any

from millstream.api.errors import PARAM_LENGTH, shortened, told
from millstream.errors import MillstreamError
from millstream.realtime_types import AudioFormat, Item, Part, Response, SessionConfig, TurnDetection
from millstream.types import Usage

_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
_BETA_PARTS = {"output_text": "text", "output_audio": "audio"}
_EVENT_PARTS = _BETA_PARTS
"""Events of content parts use the short names in both."""


def item_object(item: Item, *, beta: bool) -> dict[str, Any]:
    value: dict[str, Any] = {
        "id": item.id,
        "object": "realtime.item",
        "type": item.kind,
        "status": item.status,
    }
    if item.kind == "function_call":
        return value | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    if item.kind == "function_call_output":
        return value | {"call_id": item.call_id, "output": item.output}
    return value | {"role": item.role, "content": [_part(part, beta=beta) for part in item.parts]}


def _part(part: Part, *, beta: bool) -> dict[str, Any]:
    kind = _BETA_PARTS.get(part.kind, part.kind) if beta else part.kind
    if part.kind == "input_image":
        return {"type": kind}
    return {"type": kind, ("transcript" if part.kind.endswith("audio") else "text"): part.text}


def part_object(part: Part) -> dict[str, Any]:
    """A content part of a response, as its own events show it."""
    return {
        "type": _EVENT_PARTS.get(part.kind, part.kind),
        ("transcript" if part.kind == "output_audio" else "text"): part.text,
    }


def error_object(error: MillstreamError, event_id: str | None = None) -> dict[str, Any]:
    return {
        "type": error.kind,
        "code": error.code,
        "message": told(error),
        "param": None if error.param is None else shortened(error.param, PARAM_LENGTH),
        "event_id": event_id,
    }


def response_object(response: Response, conversation_id: str, *, beta: bool) -> dict[str, Any]:
    config = response.options.config
    value: dict[str, Any] = {
        "id": response.id,
        "object": "realtime.response",
        "status": response.status,
        "status_details": _status_details(response),
        "output": [item_object(item, beta=beta) for item in response.output],
        "conversation_id": conversation_id if response.options.in_conversation else None,
        "max_output_tokens": config.max_output_tokens or "inf",
        "usage": None if response.usage is None else _usage(response.usage),
        "metadata": None if response.options.metadata is None else dict(response.options.metadata),
    }
    if beta:
        sound = {"voice": config.voice, "output_audio_format": _beta_format(config.output_format)}
        return value | {"modalities": _modalities(config, beta=True), "temperature": config.temperature or 0.8} | sound
    value["output_modalities"] = _modalities(config, beta=False)
    if config.speaks:
        value["audio"] = {"output": {"format": _format(config.output_format), "voice": config.voice}}
    return value


def _status_details(response: Response) -> dict[str, Any] | None:
    if response.status == "in_progress":
        return None
    details: dict[str, Any] = {"type": response.status}
    if response.reason is not None:
        details["reason"] = response.reason
    if response.error is not None:
        error = error_object(response.error)
        details["error"] = {name: error[name] for name in ("type", "code", "message")}
    return details


def _usage(usage: Usage) -> dict[str, Any]:
    cached = {"text_tokens": usage.cached_tokens, "audio_tokens": 0, "image_tokens": 0}
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": cached,
        },
        "output_token_details": {"text_tokens": usage.completion_tokens, "audio_tokens": 0},
    }


def session_object(config: SessionConfig, session_id: str, *, beta: bool) -> dict[str, Any]:
    return _beta_session(config, session_id) if beta else _session(config, session_id)


def _session(config: SessionConfig, session_id: str) -> dict[str, Any]:
    speaks_of = config.kind == "realtime"
    value: dict[str, Any] = {
        "type": config.kind,
        "object": "realtime.session" if speaks_of else "realtime.transcription_session",
        "id": session_id,
        "audio": {
            "input": {
                "format": _format(config.input_format),
                "transcription": _transcription(config),
                "noise_reduction": None,
                "turn_detection": _turns(config.turn_detection, config),
            }
        },
    }
    if not speaks_of:
        return value
    value["audio"]["output"] = {
        "format": _format(config.output_format),
        "voice": config.voice,
        "speed": config.speed,
        "model": config.speech_model or None,
    }
    return value | {
        "model": config.model,
        "output_modalities": _modalities(config, beta=False),
        "instructions": config.instructions,
        "tools": _tools(config),
        "tool_choice": _tool_choice(config),
        "max_output_tokens": config.max_output_tokens or "inf",
        "truncation": "auto" if config.truncates else "disabled",
    }


def _beta_session(config: SessionConfig, session_id: str) -> dict[str, Any]:
    speaks_of = config.kind == "realtime"
    value: dict[str, Any] = {
        "id": session_id,
        "object": "realtime.session" if speaks_of else "realtime.transcription_session",
        "input_audio_format": _beta_format(config.input_format),
        "input_audio_transcription": _transcription(config),
        "turn_detection": _turns(config.turn_detection, config),
    }
    if not speaks_of:
        return value
    return value | {
        "model": config.model,
        "modalities": _modalities(config, beta=True),
        "instructions": config.instructions,
        "voice": config.voice,
        "speed": config.speed,
        "output_audio_format": _beta_format(config.output_format),
        "tools": _tools(config),
        "tool_choice": _tool_choice(config),
        "temperature": 0.8 if config.temperature is None else config.temperature,
        "max_response_output_tokens": config.max_output_tokens or "inf",
    }


def _modalities(config: SessionConfig, *, beta: bool) -> list[str]:
    if not config.speaks:
        return ["text"]
    return ["text", "audio"] if beta else ["audio"]


def _format(audio_format: AudioFormat) -> dict[str, Any]:
    value: dict[str, Any] = {"type": _FORMATS[audio_format.encoding]}
    return value | {"rate": audio_format.rate} if audio_format.encoding == "pcm16" else value


def _beta_format(audio_format: AudioFormat) -> str:
    return audio_format.encoding


def _transcription(config: SessionConfig) -> dict[str, Any] | None:
    if config.transcription is None:
        return None
    settings = config.transcription
    return {"model": settings.model, "language": settings.language, "prompt": settings.prompt or ""}


def _turns(turns: TurnDetection | None, config: SessionConfig) -> dict[str, Any] | None:
    if turns is None:
        return None
    if turns.eagerness is not None:
        value: dict[str, Any] = {"type": "semantic_vad", "eagerness": turns.eagerness}
    else:
        value = {
            "type": "server_vad",
            "threshold": turns.threshold,
            "prefix_padding_ms": turns.prefix_padding_ms,
            "silence_duration_ms": turns.silence_duration_ms,
        }
    if config.kind == "realtime":
        value |= {"create_response": turns.create_response, "interrupt_response": turns.interrupt_response}
    return value


def _tools(config: SessionConfig) -> list[dict[str, Any]]:
    return [{"type": "function", **tool["function"]} for tool in config.tools]


def _tool_choice(config: SessionConfig) -> str | dict[str, Any]:
    return config.tool_choice if config.tool_name is None else {"type": "function", "name": config.tool_name}
