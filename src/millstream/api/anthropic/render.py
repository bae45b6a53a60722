"""Renders messages: a JSON object, or events of Anthropic's stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from millstream.api.anthropic.errors import error_body
from millstream.api.anthropic.output import (
    AnswerOptions,
    BlockKind,
    Ending,
    Piece,
    blocks,
    call_input,
    joined_pieces,
    pieces,
    usage_fields,
    void_calls,
)
from millstream.api.sse import event
from millstream.api.stream import StreamFormat
from millstream.errors import MillstreamError
from millstream.exact_json import dumps
from millstream.service.ports import Seal
from millstream.types import Delta, Usage

PING = event(b'{"type":"ping"}', b"ping")
STREAM = StreamFormat(b"text/event-stream; charset=utf-8", ping=PING)


class MessageRenderer:
    """One message. `seal` makes the signatures of reasoning.

    A call is sent once it is complete, because a block that has begun cannot be taken back, and a call may turn out
    to be invalid. Those of eager tools are sent as they are generated: that is what clients mean by
    `eager_input_streaming`.
    """

    stream_format = STREAM

    def __init__(self, model: str, *, seal: Seal, options: AnswerOptions) -> None:
        self._model = model
        self._id = f"msg_{uuid.uuid4().hex}"
        self._seal = seal
        self._options = options
        self._ending = Ending()
        self._index = -1
        self._open: list[Piece] = []
        """What was sent of the block that is open; empty if none is."""
        self._held: list[Piece] = []
        """A call that may not be complete yet."""

    def opening(self, usage: Usage) -> bytes:
        # What comes from the cache is known at the end only.
        counts = usage_fields(usage, AnswerOptions())
        message = self._message([], counts) | {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message) + PING

    def chunks(self, batch: Sequence[Delta]) -> bytes:
        if self._options.empty:
            return b""
        self._ending.add(batch)
        if self._held and self._held[0].call in void_calls(batch):
            self._held = []
        return b"".join(event for piece in pieces(batch) for event in self._add(piece))

    def _add(self, piece: Piece) -> list[bytes]:
        if self._held and piece.continues(self._held[0]):
            self._held.append(piece)
            return []
        if self._open and piece.continues(self._open[0]):
            self._open.append(piece)
            return self._piece_event(piece)
        events = self._close()
        if piece.kind is BlockKind.TOOL_USE and piece.name not in self._options.eager_tools:
            self._held = [piece]
            return events
        return [*events, *self._start(piece)]

    def _start(self, piece: Piece) -> list[bytes]:
        self._index += 1
        self._open = [piece]
        start = _event("content_block_start", index=self._index, content_block=self._block(piece, empty=True))
        return [start, *self._piece_event(piece)]

    def _piece_event(self, piece: Piece) -> list[bytes]:
        if not piece.text or (piece.kind is BlockKind.THINKING and not self._options.shows_thinking):
            return []
        return [self._delta(*_DELTAS[piece.kind], piece.text)]

    def _close(self) -> list[bytes]:
        """Ends the open block, if any, after sending the call that was held back, if any."""
        if self._held:
            held, self._held = joined_pieces(self._held), []
            return [*self._start(held), *self._close()]
        if not self._open:
            return []
        block, self._open = joined_pieces(self._open), []
        last = []
        if block.kind is BlockKind.THINKING:
            last = [self._delta("signature_delta", "signature", self._seal.seal(block.text))]
        elif block.kind is BlockKind.TOOL_USE and not block.text:
            last = [self._delta("input_json_delta", "partial_json", "{}")]
        return [*last, _event("content_block_stop", index=self._index)]

    def _delta(self, kind: str, field: str, value: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, field: value})

    def ending(self, usage: Usage) -> bytes:
        counts = usage_fields(usage, self._options)
        last = _event("message_delta", delta=self._ending.fields(), usage=counts)
        return b"".join((*self._close(), last, _event("message_stop")))

    def failure(self, error: MillstreamError) -> bytes:
        return event(error_body(error), b"error")

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        deltas = () if self._options.empty else deltas
        self._ending.add(deltas)
        content = [self._block(block) for block in blocks(deltas)]
        message = self._message(content, usage_fields(usage, self._options))
        return dumps(message | self._ending.fields())

    def _message(self, content: list[dict[str, object]], counts: dict[str, object]) -> dict[str, object]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": counts,
        }

    def _block(self, block: Piece, *, empty: bool = False) -> dict[str, object]:
        """The block as JSON. `empty`: as a stream begins it."""
        fields: dict[str, object] = {"type": block.kind}
        if block.kind is BlockKind.THINKING:
            shown = "" if empty or not self._options.shows_thinking else block.text
            return fields | {"thinking": shown, "signature": "" if empty else self._seal.seal(block.text)}
        if block.kind is BlockKind.TEXT:
            return fields | {"text": "" if empty else block.text}
        return fields | {"id": block.id, "name": block.name, "input": {} if empty else call_input(block.text)}


_DELTAS = {
    BlockKind.THINKING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.TOOL_USE: ("input_json_delta", "partial_json"),
}


def _event(kind: str, **fields: object) -> bytes:
    return event(dumps({"type": kind, **fields}), kind.encode())
