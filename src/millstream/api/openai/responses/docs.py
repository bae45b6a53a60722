"""What the routes of the Responses API say in /openapi.json."""

from __future__ import annotations

from typing import Any

from millstream.api.error_docs import ANY_REQUEST, SERVICE
from millstream.api.openai.docs import ERRORS
from millstream.api.openai.responses.listing import MAX_LIMIT, ORDERS
from millstream.api.openai.responses.response_schema import (
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseEvent,
    ResponseObject,
)
from millstream.api.openai.responses.schema import InputTokensRequest, ResponseRequest
from millstream.api.openapi import documented, reference

_STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "title": "ResponseStreamEvent",
            "description": (
                "One server-sent event: an `event:` line with its type, a `data:` line and an empty line. The last "
                "event is response.completed, response.incomplete or response.failed. A line that begins with a colon "
                "is a comment, sent to keep an idle connection open."
            ),
            "type": "object",
            "required": ["event", "data"],
            "properties": {
                "event": {"type": "string"},
                "data": {
                    "type": "string",
                    "contentMediaType": "application/json",
                    "contentSchema": reference(ResponseEvent),
                },
            },
        }
    }
}
_STORED = ERRORS.references(ANY_REQUEST | {404})

_EXAMPLES: dict[str, Any] = {
    "question": {
        "summary": "A question",
        "value": {"instructions": "Answer in one sentence.", "input": "What is a millstream?", "max_output_tokens": 64},
    },
    "stream": {
        "summary": "Streamed",
        "value": {"input": "Count to ten.", "max_output_tokens": 64, "stream": True},
    },
    "tools": {
        "summary": "With a function that the model may call",
        "value": {
            "input": [{"role": "user", "content": "How is the weather in Bern?"}],
            "max_output_tokens": 64,
            "tools": [
                {
                    "type": "function",
                    "name": "weather",
                    "description": "The weather in a city",
                    "parameters": {
                        "type": "object",
                        "properties": {"city": {"type": "string"}},
                        "required": ["city"],
                    },
                }
            ],
        },
    },
    "schema": {
        "summary": "Structured output",
        "value": {
            "input": "Name a river.",
            "max_output_tokens": 64,
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "river",
                    "schema": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}},
                }
            },
        },
    },
}
_COUNT_EXAMPLES: dict[str, Any] = {"text": {"summary": "A text", "value": {"input": "What is a millstream?"}}}


def _query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


CREATE = documented(
    ResponseObject,
    "The response: whole, or with `stream` as server-sent events. With `background`, as it is now: queued.",
    errors=ERRORS.references(SERVICE),
    body=ResponseRequest,
    examples=_EXAMPLES,
    stream=_STREAM,
)
COUNT = documented(
    InputTokens,
    "The number of tokens.",
    errors=ERRORS.references(SERVICE),
    body=InputTokensRequest,
    examples=_COUNT_EXAMPLES,
)
RETRIEVE = documented(
    ResponseObject,
    "The response. With `stream`, the events of a background response.",
    errors=_STORED,
    stream=_STREAM,
) | {
    "parameters": [
        _query("stream", {"enum": ["true", "false"]}, "Stream the events of a background response."),
        _query(
            "starting_after",
            {"type": "integer", "minimum": 0, "maximum": 10**9 - 1},
            "With stream: the sequence_number of the last event that the client has.",
        ),
    ]
}
DELETE = documented(DeletedResponse, "The response is deleted.", errors=_STORED)
CANCEL = documented(ResponseObject, "The response, which has ended.", errors=_STORED)
INPUT_ITEMS = documented(InputItemList, "A page of the items.", errors=_STORED) | {
    "parameters": [
        _query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}, "Items on a page. Default: 20."),
        _query("order", {"enum": list(ORDERS)}, "Default: desc, the last item first."),
        _query("after", {"type": "string"}, "The id of the last item of the page before."),
    ]
}
