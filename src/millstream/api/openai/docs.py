"""What all of OpenAI's routes share in /openapi.json: error responses and the description of a stream."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from millstream.api.error_docs import ErrorDocs
from millstream.api.openai.errors import ErrorResponse
from millstream.api.openapi import reference

ERRORS = ErrorDocs(ErrorResponse)


def event_stream(chunk: type[BaseModel]) -> dict[str, Any]:
    """The content of a streamed response: a schema of each event, as OpenAPI 3.1 has it."""
    payload = {"anyOf": [reference(chunk), reference(ErrorResponse)]}
    json_text = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    schema = {
        "title": f"{chunk.__name__}Event",
        "description": (
            "One server-sent event: a `data:` line and an empty line. Its data is a chunk as JSON, or `[DONE]`, which "
            "ends every complete stream. A failure after the first event is an event with an `error` field, and no "
            "`[DONE]` follows. A line that begins with a colon is a comment, sent to keep an idle connection open."
        ),
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [json_text, {"const": "[DONE]"}]}},
    }
    return {"text/event-stream": {"schema": schema}}
