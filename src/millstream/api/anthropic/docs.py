"""What all of Anthropic's routes share in /openapi.json: error responses and the description of the stream."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from millstream.api.anthropic.errors import OVERLOADED, AnthropicErrorResponse
from millstream.api.anthropic.response_schema import EVENTS
from millstream.api.error_docs import SERVICE, ErrorDocs
from millstream.api.openapi import reference

ERRORS = ErrorDocs(
    AnthropicErrorResponse,
    prefix="Anthropic",
    codes=False,
    own=((OVERLOADED, "The model or the server is full. Try again in a moment."),),
)
STATUSES = SERVICE | {OVERLOADED}

_MODELS: tuple[type[BaseModel], ...] = (*EVENTS, AnthropicErrorResponse)
_PAYLOAD = {"anyOf": [reference(model) for model in _MODELS]}
EVENT_STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "title": "AnthropicEvent",
            "description": (
                "One server-sent event: an `event:` line, a `data:` line and an empty line. The data is JSON, and its "
                "type is the name of the event. A complete stream ends with `message_stop`. A failure after the first "
                "event is an `error` event, and nothing follows."
            ),
            "type": "object",
            "required": ["event", "data"],
            "properties": {
                "event": {"type": "string"},
                "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": _PAYLOAD},
            },
        }
    }
}
"""The content of a streamed message: a schema of each event, as OpenAPI 3.1 has it."""
