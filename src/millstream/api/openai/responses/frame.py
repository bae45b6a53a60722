"""The response object: the fields around its output, which repeat what was requested."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from millstream.api.errors import told
from millstream.api.openai.responses.ids import new_response_id
from millstream.api.openai.responses.schema import ResponseRequest
from millstream.errors import BadRequest, ContextOverflow, EngineBusy, MediaRefused, MillstreamError, Overloaded
from millstream.types import Sampling, Usage

JsonItem = dict[str, Any]
ENDED = ("completed", "incomplete", "failed", "cancelled")

_NOT_USED = dict.fromkeys(
    (
        "access_programs",
        "conversation",
        "image",
        "moderation",
        "prompt",
        "prompt_cache_diagnostics",
        "prompt_cache_options",
        "prompt_cache_retention",
        "tool_usage",
    )
)
"""Fields that OpenAI's response object has, and that have no meaning here."""


class Frame:
    """Renders the response object at any time of its life."""

    def __init__(self, request: ResponseRequest, tools: Sequence[JsonItem]) -> None:
        self.id = new_response_id()
        self.model = request.model
        """The name that was requested, until the model that answers is known."""
        self.sampling: Sampling = request.generation_fields()["sampling"]
        """As requested, until what the model's defaults add is known."""
        self._request = request
        self._created = int(time.time())
        self._completed: int | None = None
        self._tools = [_tool_fields(tool) for tool in tools]

    def render(
        self,
        status: str,
        output: Sequence[JsonItem] = (),
        *,
        usage: Usage | None = None,
        error: MillstreamError | None = None,
        incomplete: str | None = None,
    ) -> dict[str, Any]:
        request, sampling = self._request, self.sampling
        if status == "completed" and self._completed is None:
            self._completed = int(time.time())  # once: what is stored equals what was streamed
        return {
            **_NOT_USED,
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": request.background,
            "completed_at": self._completed if status == "completed" else None,
            "error": None if error is None else error_fields(error),
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "instructions": request.instructions,
            "max_output_tokens": request.given("max_tokens"),
            "max_tool_calls": request.max_tool_calls,
            "model": self.model,
            "output": list(output),
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": request.reasoning.get("effort"), "summary": request.reasoning.get("summary")},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}} | request.text,
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": self._tools,
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": request.truncation,
            "usage": None if usage is None else usage_fields(usage),
            "user": request.user,
            "metadata": request.metadata,
        }


def _tool_fields(tool: JsonItem) -> JsonItem:
    """A function in OpenAI's form, with all its fields, as SDKs expect it."""
    if tool.get("type") != "function":
        return tool
    function = tool["function"] if "name" not in tool else tool
    return {"description": None, "parameters": None, "strict": None} | function | {"type": "function"}


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_fields(error: MillstreamError) -> dict[str, Any]:
    """The error of a response that failed."""
    return {"code": _code(error), "message": told(error)}


def _code(error: MillstreamError) -> str:
    """Codes that OpenAI's clients know. Codex shortens its history by itself on `context_length_exceeded`."""
    match error:
        case ContextOverflow():
            return error.code
        case MediaRefused():
            return "invalid_image"
        case BadRequest():
            return "invalid_prompt"
        case EngineBusy() | Overloaded():
            return "rate_limit_exceeded"
        case _:
            return "server_error"
