"""Chat templates: the Jinja source that a model ships, run in a sandbox because nobody here has read it.

Only `template_child` compiles and renders one: see there why.
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
    """A template that nobody has compiled yet, and the names of special tokens that it may use (`bos_token`, ...)."""

    source: str
    tokens: Mapping[str, str]


# What running a template can raise: its own complaint, or Python's about an operation on the client's values.
_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class _GenerationTag(Extension):
    """Training marks the model's own words with `{% generation %}`. For a server the mark means nothing."""

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
    """Jinja's own filter escapes for HTML, which a model has never seen."""
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
    """A message's content as one string: parts of text are joined, nothing is the empty string."""
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
            raise BadRequest(f"this model reads text only, and a message has a part of type '{kind}'", param="messages")
        case _:
            raise BadRequest('a text part looks like {"type": "text", "text": "..."}', param="messages")


class ChatTemplate:
    """A compiled template. `tokens` are the names of special tokens that templates may use (`bos_token`, ...)."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template does not compile: line {error.lineno}: {error}") from error
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._tokens = dict(tokens)
        # Some vision models' templates look for parts and write nothing of a string.
        self._parts_only = not self._reads(_PROBE, _PROBE) and self._reads([_text_part(_PROBE)], _PROBE)

    def render(self, messages: Sequence[Message], /, **kwargs: object) -> str:
        """The prompt. Asks for the assistant's turn unless `add_generation_prompt` is given as false."""
        return self._render([self._with_text(message) for message in messages], kwargs)

    def render_media(self, messages: Sequence[Message], markers: Mapping[str, str], /, **kwargs: object) -> str:
        """The prompt of messages with images and other media in them: the marker of its kind stands wherever there is
        one."""
        kinds = {str(part["type"]) for message in messages if _is_list(message) for part in _parts(message)} - {"text"}
        if all(kind in markers and self._writes(kind, markers[kind]) for kind in kinds or {"image"}):
            fitted = [_with_parts(message) if _is_list(message) else self._with_text(message) for message in messages]
        else:
            fitted = [{**message, "content": _marked(message.get("content"), markers)} for message in messages]
        return self._render(fitted, kwargs)

    def _with_text(self, message: Message) -> Message:
        text = plain_text(message.get("content"))
        return {**message, "content": [_text_part(text)] if self._parts_only else text}

    def _render(self, messages: Sequence[Message], kwargs: Mapping[str, object]) -> str:
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **self._tokens, **kwargs}
        try:
            return self._template.render({**values, "messages": messages})
        except _FAILURES as error:
            raise BadRequest(f"the model's chat template refused the messages: {error}", param="messages") from error

    def _writes(self, kind: str, marker: str) -> bool:
        """Whether a part of this kind becomes its marker."""
        return self._reads([{"type": kind}, _text_part(_PROBE)], marker, _PROBE)

    def _reads(self, content: object, *signs: str) -> bool:
        """Whether a message with this content gives a prompt with these signs in it, and no Python object."""
        try:
            text = self._render([{"role": "user", "content": content}], {})
        except BadRequest:
            return False
        return all(sign in text for sign in signs) and "'type'" not in text


_PROBE = "a text to look for"


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _is_list(message: Message) -> bool:
    return isinstance(message.get("content"), list)


def _with_parts(message: Message) -> Message:
    """Parts as templates know them: what the media are is none of their business."""
    parts = [part if part.get("type") == "text" else {"type": part["type"]} for part in _parts(message)]
    return {**message, "content": parts}


def _parts(message: Message) -> list[dict[str, object]]:
    parts = message["content"]
    assert isinstance(parts, list)
    return parts


def _marked(content: object, markers: Mapping[str, str]) -> str:
    """For templates that know only strings."""
    if not isinstance(content, list):
        return plain_text(content)
    return "".join(f"{markers[part['type']]}\n" if part["type"] in markers else plain_text([part]) for part in content)
