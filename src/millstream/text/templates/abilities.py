"""What a chat template can render: plain data, found by `template_probe` and used to fit conversations to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any


class SystemRole(StrEnum):
    """Where a template renders system messages."""

    ANYWHERE = "anywhere"
    FIRST = "first"
    """Only as the first message. Elsewhere the template refuses, drops or moves them."""
    NONE = "none"


class Arguments(StrEnum):
    """The form in which a template takes the arguments of calls."""

    EITHER = "either"
    OBJECT = "object"
    STRING = "string"


class TextWithCalls(StrEnum):
    """What a template does with the text of an assistant message that has calls."""

    TOGETHER = "together"
    APART = "apart"
    """It drops the text, but renders it as a message of its own before the calls."""
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """The defaults are those of a template that renders everything where it stands."""

    system: SystemRole = SystemRole.ANYWHERE
    alternates: bool = False
    """True if two user messages, or two assistant messages, must not follow each other."""
    user_first: bool = False
    """True if a user message must come first, after the system message."""
    blank_assistant: str = ""
    """What stands for an empty assistant message."""
    tools: bool = True
    """True if it renders the tools on offer."""
    calls: bool = True
    results: bool = True
    orphan_results: bool = True
    """True if it renders tool results that follow no call."""
    parallel_calls: bool = True
    """True if it renders several calls in one message."""
    user_after_result: bool = True
    """True if a user message may follow a call or a tool result, without an answer between them."""
    text_with_calls: TextWithCalls = TextWithCalls.TOGETHER
    arguments: Arguments = Arguments.EITHER
    keeps_turns: bool = True
    """True if a new turn leaves the earlier ones as they were rendered."""
    keeps_turns_with_tools: bool = True
    keeps_reasoning: bool = True
    """True if the reasoning of earlier turns stays in the prompt."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TemplateAbilities:
        return replace(
            cls(**values),
            system=SystemRole(values["system"]),
            text_with_calls=TextWithCalls(values["text_with_calls"]),
            arguments=Arguments(values["arguments"]),
        )

    def prefix_notes(self, *, reasons: bool) -> tuple[str, ...]:
        """Says for the log why the prompt of a turn may not begin with the prompt of the turn before it.

        `reasons`: the model writes reasoning.
        """
        notes = []
        if not self.keeps_turns:
            notes.append("it renders earlier turns anew with each turn")
        elif not self.keeps_turns_with_tools:
            notes.append("with tools, it renders earlier turns anew with each turn")
        if reasons and not self.keeps_reasoning:
            notes.append("it leaves out the reasoning of earlier turns")
        return tuple(notes)


ABLE = TemplateAbilities()
STRICT = TemplateAbilities(
    system=SystemRole.NONE,
    alternates=True,
    user_first=True,
    calls=False,
    results=False,
)
"""A template that renders user and assistant messages in turn, and nothing else."""
