"""Frames between a server and an engine's process, the mailbox that reads them, and a link that an event loop polls."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from millstream.engine.generation.messages import Generate, Generated
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.messages import Cancel, Command, Failed, RequestEvent, Shutdown, Submit, Wake
from millstream.engine.process_link import ProcessLink
from millstream.engine.wire import FrameReader, frame, read_first, socket_pair
from millstream.engine.wire_mailbox import GONE, WireMailbox
from millstream.errors import EngineGone
from millstream.service.admission import Admission
from millstream.service.engine_client import EngineClient
from millstream.service.inbox import Inbox
from millstream.service.unread_output import UnreadOutput
from support.fake import FakeBackend
from support.processes import children_find_us

LONG = 60.0
"""Seconds that no wait takes."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket_pair()
    with ours, theirs:
        yield ours, theirs


def test_a_reader_waits_for_nothing_and_joins_pieces(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    reader = FrameReader(theirs)
    assert reader.read() is None
    data = frame("first") + frame(["second"]) + frame("third")
    ours.sendall(data[:-3])
    assert reader.read() == ["first", ["second"]]
    assert reader.read() is None
    ours.sendall(data[-3:])
    assert reader.read() == ["third"]
    ours.close()
    with pytest.raises(EOFError):
        reader.read()


def test_the_first_message_leaves_the_next_ones(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    ours.sendall(frame("settings") + frame("command"))
    assert read_first(theirs) == "settings"
    assert FrameReader(theirs).read() == ["command"]


def test_a_mailbox_takes_from_the_server_and_from_threads(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    mailbox = WireMailbox(theirs)
    assert mailbox.take() == []
    ours.sendall(frame(Submit(1)) + frame(Cancel(1)))
    assert mailbox.take(timeout=LONG) == [Submit(1), Cancel(1)]
    poster = threading.Timer(0.05, mailbox.post_soon, [Wake()])
    poster.start()
    assert mailbox.take(timeout=LONG) == [Wake()]
    poster.join()
    ours.sendall(frame(Submit(2)))
    assert mailbox.take(timeout=LONG) == [Submit(2)]
    assert mailbox.close("done") == []


def test_a_busy_owner_sees_a_shutdown(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    mailbox = WireMailbox(theirs)
    assert mailbox.shutdown_reason() is None
    ours.sendall(frame(Submit(1)) + frame(Shutdown("enough")))
    assert mailbox.shutdown_reason() == "enough"
    assert mailbox.close("closed") == [Submit(1), Shutdown("enough")]
    with pytest.raises(EngineGone, match="closed"):
        mailbox.post_soon(Wake())


def test_the_end_of_the_server_is_a_shutdown(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    mailbox = WireMailbox(theirs)
    ours.sendall(frame(Submit(1)))
    ours.close()
    assert mailbox.take(timeout=LONG) == [Submit(1), Shutdown(GONE)]
    assert mailbox.close("done") == []


async def ended(inbox: Inbox) -> RequestEvent:
    while True:
        for event in await inbox.take():
            if isinstance(event, Generated | Failed):
                return event


def polled(monkeypatch: pytest.MonkeyPatch) -> tuple[EngineClient, ProcessLink]:
    children_find_us(monkeypatch)
    backend = functools.partial(FakeBackend, max_rows=4)
    link = ProcessLink("test", backend, functools.partial(make_scheduler, SchedulerSettings()))
    return EngineClient(link, Admission(capacity=4, queue=8, fail_fast=False)), link


def test_an_event_loop_polls_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a command that is larger than what the system takes at once: a later one does not overtake it."""

    async def scene() -> list[Command | RequestEvent]:
        client, _ = polled(monkeypatch)
        await client.load()
        inboxes = [Inbox(UnreadOutput(2**30)) for _ in range(2)]
        client.submit([Generate(1, (7,) * 2_000_000, 3)], inboxes[0])
        client.cancel([1])
        client.submit([Generate(2, (1, 2), 3)], inboxes[1])
        events = [await ended(inbox) for inbox in inboxes]
        assert await client.stop("done", LONG)
        return [*events]

    first, second = asyncio.run(scene())
    assert isinstance(first, Generated | Failed) and first.request_id == 1
    assert isinstance(second, Generated) and second.usage.completion_tokens == 3


def test_requests_of_a_killed_child_fail_where_a_loop_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> tuple[RequestEvent, str | None]:
        client, link = polled(monkeypatch)
        await client.load()
        inbox = Inbox(UnreadOutput(2**30))
        client.submit([Generate(1, (1, 2), 100_000)], inbox)
        await inbox.take()
        pid, _ = link.where()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        end = await ended(inbox)
        return end, await client.wait_gone()

    end, cause = asyncio.run(scene())
    assert isinstance(end, Failed) and end.gone and "signal 9" in end.message
    assert cause is not None and "signal 9" in cause
