"""Chat templates: Jinja source that ships with a model, rendered in Jinja's sandbox because it is untrusted.

Only `template_child` compiles and renders templates: see there for the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millstream.errors import BadRequest, ModelError
from millstream.exact_json import dumps_text

Message = Mapping[str, object]

END_OF_PROMPT = "\ufdd1"
"""Stands after the text of a message that the model is to continue: what the template writes after it is cut off. A
noncharacter, so that no template trims it."""


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
    return dumps_text(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
        self._no_tools: list[object] | None = None
        self._part_roles: frozenset[str] = frozenset()
        """Roles whose content must be a list of parts."""
        self._null_with_calls = False
        """True if calls are rendered only in messages whose content is null."""
        self._fit()

    def _fit(self) -> None:
        """Finds out by trial which forms of content the template renders."""
        # Some templates loop over the tools without asking whether there are any.
        if not self._renders_text():
            self._no_tools = []
            self._no_tools = [] if self._renders_text() else None
        # Templates of some vision models expect a list of parts and render nothing for a string.
        for role in ("user", "system", "assistant"):
            if not self._renders(role, _PROBE, _PROBE) and self._renders(role, [_text_part(_PROBE)], _PROBE):
                self._part_roles |= {role, "tool"} if role == "user" else {role}
        self._null_with_calls = not self._renders_call("") and self._renders_call(None)

    def render(self, messages: Sequence[Message], /, **kwargs: object) -> str:
        """Returns the prompt. It opens the assistant's turn unless `add_generation_prompt` is false."""
        return self._render([self._with_text(message) for message in messages], kwargs)

    def render_media(self, messages: Sequence[Message], markers: Mapping[str, str], /, **kwargs: object) -> str:
        """Returns the prompt of messages with images, audio or video. Each of them becomes the marker of its kind.

        Each message is fitted by itself, so a later one does not change how the earlier ones are rendered.
        """
        return self._render([self._with_media(message, markers) for message in messages], kwargs)

    def _with_text(self, message: Message) -> Message:
        text = plain_text(message.get("content"))
        if self._null_with_calls and message.get("tool_calls") and not text:
            return {**message, "content": None}
        return self._with_string(message, text)

    def _with_media(self, message: Message, markers: Mapping[str, str]) -> Message:
        kinds = _media_kinds(message)
        if not kinds:
            return self._with_text(message)
        role = str(message["role"])
        if all(kind in markers and self._renders_media(role, kind, markers[kind]) for kind in kinds):
            return _with_parts(message)
        return self._with_string(message, _with_markers(message.get("content"), markers))

    def _with_string(self, message: Message, text: str) -> Message:
        return {**message, "content": [_text_part(text)] if message.get("role") in self._part_roles else text}

    def _render(self, messages: Sequence[Message], kwargs: Mapping[str, object]) -> str:
        values = {"tools": self._no_tools, "documents": None, "add_generation_prompt": True, **self._tokens, **kwargs}
        try:
            return self._template.render({**values, "messages": messages})
        except _RENDER_ERRORS as error:
            raise BadRequest(f"the model's chat template rejected the messages: {error}", param="messages") from error

    def _renders_media(self, role: str, kind: str, marker: str) -> bool:
        """True if the template renders a part of this kind, in a message of this role, as its marker."""
        return self._renders(role, [{"type": kind}, _text_part(_PROBE)], marker, _PROBE)

    def _renders(self, role: str, content: object, *expected: str) -> bool:
        """True if a message with this content renders to the expected strings, without a printed Python object."""
        message: Message = {"role": role, "content": content}
        user = self._with_string({"role": "user"}, "hi")
        before: list[Message] = [] if role in ("system", "user") else [user]
        if role == "tool":
            message = {**message, "tool_call_id": _CALL_ID}
            before.append(_calling(None if self._null_with_calls else "", {}))
        text = self._probe([*before, message, *([user] if role == "system" else [])])
        return text is not None and all(each in text for each in expected) and "'type'" not in text

    def _renders_text(self) -> bool:
        return self._renders("user", _PROBE, _PROBE) or self._renders("user", [_text_part(_PROBE)], _PROBE)

    def _renders_call(self, content: object) -> bool:
        """True if a call is rendered, with its arguments as an object or as a string."""
        user = self._with_string({"role": "user"}, "hi")
        forms: tuple[object, ...] = ({}, "{}")
        texts = [self._probe([user, _calling(content, arguments)]) for arguments in forms]
        return any(text is not None and _FUNCTION in text for text in texts)

    def _probe(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._render(messages, {})
        except BadRequest:
            return None


_PROBE = "a text to look for"
_FUNCTION, _CALL_ID = "probe_function", "probecall"


def _calling(content: object, arguments: object) -> Message:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _media_kinds(message: Message) -> set[str]:
    content = message.get("content")
    return {str(part["type"]) for part in content} - {"text"} if isinstance(content, list) else set()


def _with_parts(message: Message) -> Message:
    """Removes the media themselves: a template needs only their types."""
    parts = message["content"]
    assert isinstance(parts, list)
    return {**message, "content": [part if part["type"] == "text" else {"type": part["type"]} for part in parts]}


def _with_markers(content: object, markers: Mapping[str, str]) -> str:
    """Joins the parts to one string, for templates that expect strings."""
    if not isinstance(content, list):
        return plain_text(content)
    return "".join(f"{markers[part['type']]}\n" if part["type"] in markers else plain_text([part]) for part in content)
