"""The process that runs a model's chat template: `python -m millstream.text.template_child`, one for each model.

A template is a stranger's program. Jinja's sandbox keeps it from files and objects, but not from looping for ever or
from multiplying a string until memory is gone. Here it may try both: the system ends what takes too much CPU time, and
refuses what takes too much memory.

Frames on a socket at descriptor 0: four bytes of length, then JSON from the parent and a verdict from the child: one
byte, then text.
"""

from __future__ import annotations

import json
import signal
import socket
from struct import Struct
from typing import Any

from millstream import sandbox
from millstream.errors import BadRequest, MillstreamError
from millstream.text.template import ChatTemplate

LENGTH = Struct(">I")
RENDERED, REFUSED = b"+", b"-"
MEMORY = 2**30
"""Bytes of address space: the interpreter takes some 50 MB of it, a prompt of 32 MB some 200."""
CPU_SECONDS = 5.0
"""For one prompt, or for compiling the template. A real one takes milliseconds."""


def main() -> None:
    sandbox.limit(memory=MEMORY)
    with socket.socket(fileno=0) as link:
        template: ChatTemplate | None = None
        while (job := _receive(link)) is not None:
            # CPU time, so that a busy machine does not count. Nobody handles the signal, so it ends this process,
            # also inside of a single operation on a huge string.
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            try:
                if template is None:
                    template, text = ChatTemplate(job["source"], job["tokens"]), ""
                else:
                    text = render(template, job)
                _send(link, RENDERED, text)
            except MillstreamError as error:
                _send(link, REFUSED, error.message)
            except MemoryError:
                _send(link, REFUSED, f"the model's chat template needs more than {MEMORY >> 20} MiB here")
            signal.setitimer(signal.ITIMER_PROF, 0)
            job = text = None  # type: ignore[assignment]


def render(template: ChatTemplate, job: dict[str, Any]) -> str:
    """The prompt. Templates differ in what they take, so several variants of the messages are tried in turn; what is
    raised is the complaint about the first."""
    refused: BadRequest | None = None
    for messages in job["variants"]:
        try:
            text = _render(template, messages, job)
        except BadRequest as error:
            refused = refused or error
            continue
        if len(text) > job["limit"]:
            raise BadRequest(
                f"the model's chat template made {len(text)} characters of this conversation; "
                f"at most {job['limit']} are taken",
                param="messages",
            )
        return text
    assert refused is not None
    raise refused


def _render(template: ChatTemplate, messages: list[dict[str, Any]], job: dict[str, Any]) -> str:
    if job["markers"] is None:
        return template.render(messages, **job["kwargs"])
    return template.render_media(messages, job["markers"], **job["kwargs"])


def _send(link: socket.socket, verdict: bytes, text: str) -> None:
    data = verdict + text.encode("utf-8", "surrogatepass")
    link.sendall(LENGTH.pack(len(data)) + data)


def _receive(link: socket.socket) -> dict[str, Any] | None:
    """The next job; None when the parent has closed its end."""
    head = _exactly(link, LENGTH.size)
    if head is None:
        return None
    body = _exactly(link, LENGTH.unpack(head)[0])
    if body is None:
        return None
    job: dict[str, Any] = json.loads(body)
    return job


def _exactly(link: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = link.recv(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


if __name__ == "__main__":
    main()
