"""Chat templates: Jinja source that ships with a model, rendered in Jinja's sandbox because it is untrusted.

Only `template_child` compiles and renders templates: see there for the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millstream.errors import BadRequest, ModelError

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """An uncompiled template, and the special tokens that it may use by name (`bos_token`, ...)."""

    source: str
    tokens: Mapping[str, str]


# What rendering can raise: an error of the template itself, or of Python for an operation on the client's values.
_RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class _GenerationTag(Extension):
    """Ignores `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which escapes for HTML: models were not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def plain_text(content: object) -> str:
    """Returns a message's content as one string. Raises `BadRequest` if it has parts that are not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest("message content must be a string, null or a list of parts", param="messages")
    return "".join([_part_text(part) for part in content])


def _part_text(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)} | str(text):
            return text
        case {"type": str(kind)} if kind != "text":
            raise BadRequest(
                f"this model accepts text only, but a message has a part of type '{kind}'. Remove it", param="messages"
            )
        case _:
            raise BadRequest('a text part must look like {"type": "text", "text": "..."}', param="messages")


class ChatTemplate:
    """A compiled template. `tokens` are the special tokens that it may use by name (`bos_token`, ...).

    Raises `ModelError` if the source does not compile.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template does not compile: line {error.lineno}: {error}") from error
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._tokens = dict(tokens)
        # Templates of some vision models expect a list of parts and render nothing for a string.
        self._parts_only = not self._renders(_PROBE, _PROBE) and self._renders([_text_part(_PROBE)], _PROBE)

    def render(self, messages: Sequence[Message], /, **kwargs: object) -> str:
        """Returns the prompt. It opens the assistant's turn unless `add_generation_prompt` is false."""
        return self._render([self._with_text(message) for message in messages], kwargs)

    def render_media(self, messages: Sequence[Message], markers: Mapping[str, str], /, **kwargs: object) -> str:
        """Returns the prompt of messages with images, audio or video. Each of them becomes the marker of its kind."""
        kinds = {str(part["type"]) for message in messages if _is_list(message) for part in _parts(message)} - {"text"}
        if all(kind in markers and self._renders_media(kind, markers[kind]) for kind in kinds or {"image"}):
            fitted = [_with_parts(message) if _is_list(message) else self._with_text(message) for message in messages]
        else:
            fitted = [{**message, "content": _with_markers(message.get("content"), markers)} for message in messages]
        return self._render(fitted, kwargs)

    def _with_text(self, message: Message) -> Message:
        text = plain_text(message.get("content"))
        return {**message, "content": [_text_part(text)] if self._parts_only else text}

    def _render(self, messages: Sequence[Message], kwargs: Mapping[str, object]) -> str:
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **self._tokens, **kwargs}
        try:
            return self._template.render({**values, "messages": messages})
        except _RENDER_ERRORS as error:
            raise BadRequest(f"the model's chat template rejected the messages: {error}", param="messages") from error

    def _renders_media(self, kind: str, marker: str) -> bool:
        """True if the template renders a part of this kind as its marker."""
        return self._renders([{"type": kind}, _text_part(_PROBE)], marker, _PROBE)

    def _renders(self, content: object, *expected: str) -> bool:
        """True if a message with this content renders to the expected strings, without a printed Python object."""
        try:
            text = self._render([{"role": "user", "content": content}], {})
        except BadRequest:
            return False
        return all(each in text for each in expected) and "'type'" not in text


_PROBE = "a text to look for"


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _is_list(message: Message) -> bool:
    return isinstance(message.get("content"), list)


def _with_parts(message: Message) -> Message:
    """Removes the media themselves: a template needs only their types."""
    parts = [part if part.get("type") == "text" else {"type": part["type"]} for part in _parts(message)]
    return {**message, "content": parts}


def _parts(message: Message) -> list[dict[str, object]]:
    parts = message["content"]
    assert isinstance(parts, list)
    return parts


def _with_markers(content: object, markers: Mapping[str, str]) -> str:
    """Joins the parts to one string, for templates that expect strings."""
    if not isinstance(content, list):
        return plain_text(content)
    return "".join(f"{markers[part['type']]}\n" if part["type"] in markers else plain_text([part]) for part in content)
