"""Data types of tool-call formats: markers, patterns, syntax and a parse function.

A format module only declares these. `text/output/splitter.py` runs the streaming state machine for all formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of each function's parameters, by function name."""

SEPARATORS = re.compile(r'(?:[\s,;\[\]{}`]|"id"\s*:\s*"[^"]*")*')
"""Text that may appear between two calls and carries no meaning."""


class NotACall(ValueError):
    """The text between two markers is not a tool call, so it goes to the client as content."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed tool call."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers around a model's reasoning. Chat templates and this server write the first of each."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    after: str = ""
    """Text that the model writes between its reasoning and its answer."""

    @property
    def closing(self) -> str:
        """What closes a reasoning by force."""
        return f"{self.closes[0]}{self.after}" if self.after else f"\n{self.closes[0]}\n\n"


@dataclass(frozen=True, slots=True)
class Block:
    """A section of the output that holds one or more calls. Without `ends`, it extends to the end of the output."""

    start: str
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyedArguments:
    """Syntax of arguments that are written one by one. `{key}` is replaced by the argument's name."""

    before: str
    after: str
    between: str = ""
    quote: str = ""
    """The quote around strings. If empty, a string is written without quotes, up to `after`."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes calls. Grammars that force a call are built from it. `{name}` is the function's name."""

    before: str
    after: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    arguments: KeyedArguments | None = None
    """None if the arguments are a JSON object."""
    many: bool = True
    """True if one answer may hold several calls."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A tool-call format.

    `parse` parses a complete block, markers included, and raises `NotACall`. `head` matches the start of a call whose
    arguments are a JSON object, so that they can be streamed. Its first non-empty group is the function's name.
    """

    name: str
    blocks: tuple[Block, ...]
    parse: Callable[[str, Schemas], list[ToolCall]]
    syntax: CallSyntax
    template_hints: tuple[tuple[str, ...], ...]
    """A chat template uses this format if it contains all strings of one of these groups."""
    token_hints: tuple[str, ...] = ()
    """If the template decides nothing, a vocabulary with all of these tokens means this format."""
    head: re.Pattern[str] | None = None
    separators: re.Pattern[str] = SEPARATORS
    bare: re.Pattern[str] | None = None
    """Start of a call without markers. An answer that matches is parsed as a block if it names a known function."""
    hidden_markers: tuple[str, ...] = ()
    """Markers that are removed from the output."""
    inner_markers: tuple[str, ...] = ()
    """More special tokens that the detokenizer must keep for `parse` and `head`."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end an answer, in addition to those that the model's files name."""
    reasoning: ReasoningMarkers | None = None
    """The format's own reasoning markers, if it has any."""
    id_format: Literal["call", "mistral", "kimi"] = "call"
    """The form of tool-call ids, for chat templates that validate them."""


def first_group(groups: tuple[Any, ...]) -> str:
    """Returns the first non-empty group: patterns have one for each way to write a function's name."""
    return next((str(group) for group in groups if group), "")
