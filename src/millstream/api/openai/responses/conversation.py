"""Makes messages of a conversation, the same that the chat API makes, so both share the prefix cache.

Items of one assistant turn (reasoning, text, calls) become one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from millstream.api.openai.responses.items_in import Called, Entry, Reasoned, Returned, Said
from millstream.api.volatile import stable_messages

Message = dict[str, Any]


class _Turn:
    """One assistant message in the making, and the outputs of calls that the server ran meanwhile."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Message] = []
        self._outputs: list[Message] = []

    def takes(self, entry: Reasoned | Said | Called) -> bool:
        if self._key is not None and entry.turn is not None:
            return self._key == entry.turn
        if self._outputs:
            return False
        # Two messages in a row are two turns, unless a call stands between them whose output is still to come.
        return not (isinstance(entry, Said) and self._texts and not self._calls)

    def returns(self, entry: Returned) -> bool:
        return entry.turn is not None and entry.turn == self._key

    def add(self, entry: Reasoned | Said | Called | Returned) -> None:
        self._key = self._key or entry.turn
        match entry:
            case Reasoned():
                self._reasoning.append(entry.text)
            case Said():
                self._texts.append(str(entry.content))
            case Called():
                function = {"name": entry.name, "arguments": entry.arguments}
                self._calls.append({"id": entry.call_id, "type": "function", "function": function})
            case Returned():
                self._outputs.append(_tool_message(entry))

    def messages(self) -> list[Message]:
        text = "".join(self._texts)
        message: Message = {"role": "assistant", "content": None if self._calls and not text else text}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return [message, *self._outputs]


def messages_of(entries: Iterable[Entry], instructions: str | None) -> tuple[Message, ...]:
    """References must be resolved. `instructions` become a system message at the beginning."""
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    turn: _Turn | None = None
    for entry in entries:
        match entry:
            case Reasoned() | Called() | Said(role="assistant"):
                if turn is None or not turn.takes(entry):
                    messages += turn.messages() if turn else ()
                    turn = _Turn()
                turn.add(entry)
            case Returned() if turn is not None and turn.returns(entry):
                turn.add(entry)
            case Returned() | Said():
                messages += turn.messages() if turn else ()
                turn = None
                messages.append(_tool_message(entry) if isinstance(entry, Returned) else _said(entry))
    messages += turn.messages() if turn else ()
    return tuple(cast(list[Message], stable_messages(messages)))


def _said(entry: Said) -> Message:
    return {"role": entry.role, "content": entry.content}


def _tool_message(entry: Returned) -> Message:
    return {"role": "tool", "content": entry.content, "tool_call_id": entry.call_id}


def without_oldest(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Shorter forms of a conversation, longest first: without its first turns, but with its leading system messages.

    No form begins with the output of a call that is left out.
    """
    head = 0
    while head < len(messages) and messages[head]["role"] == "system":
        head += 1
    starts = [index for index in range(head + 1, len(messages)) if messages[index]["role"] in ("user", "assistant")]
    return [(*messages[:head], *messages[start:]) for start in starts]
