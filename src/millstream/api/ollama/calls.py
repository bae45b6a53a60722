"""Tool calls: Ollama's clients get each call whole, with its arguments as an object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millstream.api.render import joined_calls
from millstream.exact_json import loads
from millstream.types import CallDelta

Fields = dict[str, object]


class CallCollector:
    """Collects the pieces of calls. A call is complete when the next one begins or the output ends."""

    def __init__(self) -> None:
        self._pieces: list[CallDelta] = []

    def add(self, pieces: Iterable[CallDelta]) -> list[Fields]:
        """Returns the calls that are complete now."""
        complete: list[Fields] = []
        for piece in pieces:
            if self._pieces and piece.index != self._pieces[0].index:
                complete += self.end()
            self._pieces.append(piece)
        return complete

    def end(self) -> list[Fields]:
        """Returns the last call, if there is one."""
        calls, self._pieces = call_fields(self._pieces), []
        return calls


def call_fields(pieces: Sequence[CallDelta]) -> list[Fields]:
    """Returns the calls that are valid. One that the token limit cut off has no arguments that could be sent as an
    object, so it is left out, and the reason `length` says why."""
    joined = [(call, _object(call.arguments)) for call in joined_calls(pieces) if not call.void]
    return [
        {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}
        for call, arguments in joined
        if arguments is not None
    ]


def _object(text: str) -> dict[str, object] | None:
    try:
        value = loads(text or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
