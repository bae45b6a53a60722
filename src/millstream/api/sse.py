"""Framing of server-sent events, for the dialects that stream them."""

from __future__ import annotations

from millstream.api.stream import StreamFormat

EVENT_STREAM = StreamFormat(b"text/event-stream; charset=utf-8", ping=b": ping\n\n")
"""Its ping is a comment, which clients ignore."""


def event(data: bytes, name: bytes = b"") -> bytes:
    """Frames one event. `data` must not contain a line break."""
    return (b"event: " + name + b"\n" if name else b"") + b"data: " + data + b"\n\n"
