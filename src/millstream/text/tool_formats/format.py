"""What a tool format is: markers, patterns and a parser. The state machine in `text/output.py` does the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by its name."""

GLUE = re.compile(r'(?:[\s,;\[\]{}`]|"id"\s*:\s*"[^"]*")*')
"""What may stand between calls and means nothing."""


class NotACall(ValueError):
    """The text between two markers is no call; it goes to the client as text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What stands around a model's thoughts. The first of each is what templates and this server write."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    after: str = ""
    """What a model writes next, before it answers."""


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of text with one or more calls. No ends: it goes on to the end of the answer."""

    start: str
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Keyed:
    """Arguments one by one, each between its own marks. `{key}` stands for the name."""

    before: str
    after: str
    between: str = ""
    quote: str = ""
    """Around texts. Empty: a text stands as it is, up to `after`."""


@dataclass(frozen=True, slots=True)
class Written:
    """How a model writes calls: the pattern of grammars that force a call. `{name}` stands for the function's."""

    before: str
    after: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    arguments: Keyed | None = None
    """None: a JSON object."""
    many: bool = True
    """Whether an answer may hold more than one call."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`parse` reads a whole block, its markers included, and raises `NotACall`. `head` begins a call, up to arguments
    that are a JSON object: they can be streamed. Its group `name` is the function's."""

    name: str
    blocks: tuple[Block, ...]
    parse: Callable[[str, Schemas], list[ToolCall]]
    written: Written
    signs: tuple[tuple[str, ...], ...]
    """A template that holds all strings of one of these groups is of this format."""
    tokens: tuple[str, ...] = ()
    """Or a vocabulary that holds all of these, where the template says nothing."""
    head: re.Pattern[str] | None = None
    glue: re.Pattern[str] = GLUE
    bare: re.Pattern[str] | None = None
    """A call without any marker: an answer that begins so is read as a block. Its name must be a known one."""
    silent: tuple[str, ...] = ()
    """Markers that mean nothing to a client."""
    inner: tuple[str, ...] = ()
    """Further special tokens that `parse` and `head` must see."""
    stops: tuple[str, ...] = ()
    """Tokens that end an answer, whatever the model's files say."""
    reasoning: ReasoningMarks | None = None
    """Marks of its own for thoughts."""
    ids: Literal["call", "mistral", "kimi"] = "call"
    """How ids of calls must look, for templates that check it."""
