"""Parses content blocks that become text or images of a message. The service fetches URLs later."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millstream.errors import BadRequest, UnsupportedParameter
from millstream.exact_json import dumps_text
from millstream.types import MediaPart

Block = Mapping[str, Any]
Part = dict[str, object]
"""In the form of `ChatPrompt`."""
Content = str | list[Part]

HOSTED = re.compile(r"(?:server|mcp)_tool_use|\w+_tool_result")
"""Types of blocks about tools that ran at Anthropic. A conversation that began there may contain them."""

_IMAGE_TYPE = re.compile(r"image/[a-z0-9.+-]{1,40}")


def block_list(value: object, path: str) -> list[tuple[str, Block, str]]:
    """Returns the type, the block and the path of each block."""
    if not isinstance(value, list):
        raise BadRequest(f"{path} must be a string or a list of content blocks.", param=path)
    return [_typed(block, f"{path}[{index}]") for index, block in enumerate(value)]


def _typed(block: object, path: str) -> tuple[str, Block, str]:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        raise BadRequest(f'{path} must be a content block: an object with a type, such as "text".', param=path)
    return kind, block, path


def parse_part(kind: str, block: Block, path: str) -> Part:
    """Returns the block as a part of a message. Raises `BadRequest` if its type is unknown."""
    if kind == "image":
        return {"type": "image", "media": MediaPart("image", _image_source(block.get("source"), path), path)}
    if kind in _TEXTS:
        return text_part(_TEXTS[kind](block, path))
    if HOSTED.fullmatch(kind):
        return text_part(_hosted(kind, block))
    raise UnsupportedParameter(f"{path} has the type {kind[:64]!r}, which is not supported here.", param=f"{path}.type")


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def joined(parts: Sequence[Part], separator: str = "") -> Content:
    """Returns one string if all parts are text, since many chat templates accept no list. Otherwise the parts."""
    texts = [str(part["text"]) for part in parts if part["type"] == "text"]
    return separator.join(texts) if len(texts) == len(parts) else list(parts)


def text_field(block: Block, name: str, path: str, *, required: bool = True) -> str:
    """Returns a string of a block; "" if it is absent and may be."""
    value = block.get(name)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"{path}.{name} must be a string.", param=f"{path}.{name}")
    return value


def _text(block: Block, path: str) -> str:
    return text_field(block, "text", path)


def _image_source(source: object, path: str) -> str:
    path = f"{path}.source"
    match source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)} if _IMAGE_TYPE.fullmatch(kind) and data:
            return f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)} if url:
            return url
        case {"type": "file"}:
            raise _no_files(path)
        case _:
            raise BadRequest(
                f'{path} must be {{"type": "base64", "media_type": "image/png", "data": "..."}} or '
                '{"type": "url", "url": "..."}.',
                param=path,
            )


def _document(block: Block, path: str) -> str:
    attributes = {name: text_field(block, name, path, required=False) for name in ("title", "context")}
    return _tagged("document", _document_text(block.get("source"), f"{path}.source"), attributes)


def _document_text(source: object, path: str) -> str:
    match source:
        case {"type": "text", "data": str(text)}:
            return text
        case {"type": "content", "content": str(text)}:
            return text
        case {"type": "content", "content": list(blocks)}:
            return _only_text(blocks, f"{path}.content")
        case {"type": "base64" | "url"}:
            raise UnsupportedParameter(
                f"{path}: PDFs are not supported. Send the text of the document, as a source of the type text.",
                param=path,
            )
        case {"type": "file"}:
            raise _no_files(path)
        case _:
            raise BadRequest(
                f'{path} must be {{"type": "text", "media_type": "text/plain", "data": "..."}} or '
                '{"type": "content", "content": "..."}.',
                param=path,
            )


def _no_files(path: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{path}: this server stores no files. Send the contents instead.", param=path)


def _only_text(blocks: object, path: str) -> str:
    """The text of blocks in places that have no room for media."""
    texts = []
    for kind, block, place in block_list(blocks, path):
        if kind != "text":
            raise UnsupportedParameter(
                f"{place} has the type {kind[:64]!r}; here, only text is supported.", param=f"{place}.type"
            )
        texts.append(_text(block, place))
    return "\n".join(texts)


def _search_result(block: Block, path: str) -> str:
    attributes = {name: text_field(block, name, path, required=False) for name in ("source", "title")}
    return _tagged("search_result", _only_text(block.get("content"), f"{path}.content"), attributes)


def _tool_reference(block: Block, path: str) -> str:
    return text_field(block, "tool_name", path)


def _compaction(block: Block, path: str) -> str:
    return text_field(block, "content", path, required=False)


def _hosted(kind: str, block: Block) -> str:
    """A call that ran at Anthropic, or its result. What is encrypted there is of no use here."""
    if kind.endswith("_tool_use"):
        text = dumps_text(block.get("input"))
        return _tagged(kind, text, {"name": str(block.get("name", ""))})
    return _tagged(kind, dumps_text(_readable(block.get("content"))), {})


def _readable(value: object) -> object:
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items() if not key.startswith("encrypted_")}
    return [_readable(item) for item in value] if isinstance(value, list) else value


def _tagged(tag: str, text: str, attributes: Mapping[str, str]) -> str:
    shown = "".join(f" {name}={dumps_text(value)}" for name, value in attributes.items() if value)
    return f"<{tag}{shown}>\n{text}\n</{tag}>\n"


_TEXTS: dict[str, Callable[[Block, str], str]] = {
    "text": _text,
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
    "compaction": _compaction,
}
