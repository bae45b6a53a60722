"""What an MCP server returned, as text for the model."""

from __future__ import annotations

import json

from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from millstream.service.ports import ToolOutput

MAX_OUTPUT_CHARS = 256 * 1024
"""Of one call. More would not fit the context of most models, and is held until the response ends."""


def tool_output(result: CallToolResult) -> ToolOutput:
    """Text parts as they are; other parts are described. Structured content counts if there is no text."""
    parts = [_described(block) for block in result.content]
    if result.structured_content is not None and not any(_is_text(block) for block in result.content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(part for part in parts if part)
    if result.is_error and not text:
        text = "The tool failed and gave no reason."
    return ToolOutput(bounded(text), is_error=result.is_error)


def bounded(text: str, limit: int = MAX_OUTPUT_CHARS) -> str:
    """The text, or its start and a note if it is longer than `limit`."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[Cut here: the output has {len(text)} characters, of which {limit} are shown.]"


def _is_text(block: ContentBlock) -> bool:
    return isinstance(block, TextContent) or (
        isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents)
    )


def _described(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return f"[{block.type}: {block.mime_type}, {_decoded_bytes(block.data)} bytes, not shown]"
        case ResourceLink():
            kind = f" ({block.mime_type})" if block.mime_type else ""
            return f"[resource: {block.name}, {block.uri}{kind}]"
        case EmbeddedResource():
            return _resource(block.resource)


def _resource(resource: TextResourceContents | BlobResourceContents) -> str:
    if isinstance(resource, TextResourceContents):
        return resource.text
    kind = resource.mime_type or "binary"
    return f"[resource: {resource.uri}, {kind}, {_decoded_bytes(resource.blob)} bytes, not shown]"


def _decoded_bytes(base64: str) -> int:
    return len(base64.rstrip("=")) * 3 // 4
