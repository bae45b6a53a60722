"""Child process that renders a model's chat template: `python -m millstream.text.templates.child`, one per model.

A template is an untrusted program. Jinja's sandbox denies it files and objects, but does not stop endless loops or
strings that grow until memory is exhausted. Here the kernel limits both: a signal ends the process when it exceeds its
CPU time, and allocations beyond the memory limit fail.

Frames on the socket at file descriptor 0: four bytes of length, then the payload. The parent sends JSON; the child
answers with one byte of status, then text. The first job is the template's source, and its answer the template's
abilities as JSON.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from struct import Struct
from typing import Any

from millstream import sandbox
from millstream.errors import BadRequest, MillstreamError
from millstream.exact_json import loads
from millstream.text.templates.probe import probe
from millstream.text.templates.template import END_OF_PROMPT, ChatTemplate

LENGTH = Struct(">I")
RENDERED, REFUSED = b"+", b"-"
MEMORY = 2**30
"""Bytes of address space. The interpreter takes about 50 MB, a prompt of 32 MB about 200."""
CPU_SECONDS = 5.0
"""Per prompt, and for compiling the template. Real templates take milliseconds."""


def main() -> None:
    sandbox.limit(memory=MEMORY)
    # A parent that has closed the socket wants no reply: it stops, or this took too long.
    with socket.socket(fileno=0) as link, contextlib.suppress(ConnectionError):
        template: ChatTemplate | None = None
        while (job := _receive(link)) is not None:
            # CPU time, so that a busy machine does not count. The signal is not handled, so it ends the process even
            # inside a single operation on a huge string.
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            try:
                if template is None:
                    template = ChatTemplate(job["source"], job["tokens"])
                    text = json.dumps(probe(template.render).to_json())
                else:
                    text = render(template, job)
                _send(link, RENDERED, text)
            except MillstreamError as error:
                _send(link, REFUSED, error.message)
            except MemoryError:
                _send(link, REFUSED, f"the model's chat template needs more than {MEMORY >> 20} MiB of memory for this")
            signal.setitimer(signal.ITIMER_PROF, 0)
            job = text = None  # type: ignore[assignment]


def render(template: ChatTemplate, job: dict[str, Any]) -> str:
    """Returns the prompt. Templates differ in what they accept, so the variants of the messages are tried in turn.

    Raises the error of the first variant if none renders, and `BadRequest` if the prompt is too long.
    """
    first_error: BadRequest | None = None
    for messages in job["variants"]:
        try:
            text = _render(template, messages, job)
        except BadRequest as error:
            first_error = first_error or error
            continue
        if job["continues"]:
            text = _cut(text)
        if len(text) > job["limit"]:
            raise BadRequest(
                f"the prompt is too long: the model's chat template rendered {len(text)} characters; "
                f"the limit is {job['limit']}. Shorten the conversation",
                param="messages",
            )
        return text
    assert first_error is not None
    raise first_error


def _cut(text: str) -> str:
    before, mark, _ = text.rpartition(END_OF_PROMPT)
    if not mark:
        raise BadRequest("the model's chat template cannot end a prompt within the last message", param="messages")
    return before


def _render(template: ChatTemplate, messages: list[dict[str, Any]], job: dict[str, Any]) -> str:
    if job["markers"] is None:
        return template.render(messages, **job["kwargs"])
    return template.render_media(messages, job["markers"], **job["kwargs"])


def _send(link: socket.socket, status: bytes, text: str) -> None:
    data = status + text.encode("utf-8", "surrogatepass")
    link.sendall(LENGTH.pack(len(data)) + data)


def _receive(link: socket.socket) -> dict[str, Any] | None:
    """Returns the next job, or None if the parent has closed the socket."""
    head = _receive_exactly(link, LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(link, LENGTH.unpack(head)[0])
    if body is None:
        return None
    job: dict[str, Any] = loads(body.decode())
    return job


def _receive_exactly(link: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = link.recv(min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    main()
