"""A hub over fake backends, on the loop of the test."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from millstream.config import ModelSpec
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.link import ThreadLink
from millstream.engine.messages import RequestEvent
from millstream.engine.protocols import BackendFactory
from millstream.errors import EngineGone
from millstream.service.admission import Admission
from millstream.service.engine_client import EngineClient
from millstream.service.hub import ModelHub
from millstream.service.inbox import Inbox
from millstream.service.managed_model import Loading, ManagedModel
from millstream.service.ready_model import ReadyModel
from millstream.service.unread_output import UnreadOutput
from support.fake import FakeBackend

PATIENCE = 60


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test's coroutine, and let nothing in it wait for ever."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), PATIENCE))

    return run


class Yard:
    """A hub whose models are fakes of a given size. Remembers each load."""

    def __init__(self, **settings: Any) -> None:
        self.hub = ModelHub(grace=1.0, patience=5.0, **settings)
        self.loads: list[str] = []
        self.backends: dict[str, BackendFactory] = {}
        self.before_room: Callable[[str], Awaitable[None]] | None = None
        self.before_load: Callable[[str], Awaitable[None]] | None = None
        self._numbers = iter(range(1, 10_000))

    def add(self, name: str, size: int = 10, *, now: bool = False, **spec: Any) -> ManagedModel:
        opener = functools.partial(self._open, name, size)
        return self.hub.add(name, ModelSpec(name, **spec), opener, isolation="thread", now=now)

    async def _open(self, name: str, size: int, loading: Loading) -> ReadyModel:
        self.loads.append(name)
        if self.before_room is not None:
            await self.before_room(name)
        await loading.reserve(size, size)
        if self.before_load is not None:
            await self.before_load(name)
        link = ThreadLink(
            name, self.backends.get(name, FakeBackend), lambda _: GenerationScheduler(max_rows=4, prefill_tokens=64)
        )
        engine = EngineClient(
            link,
            Admission(capacity=4, queue=100, fail_fast=False),
            on_progress=loading.progress,
            on_idle=loading.idle,
        )
        try:
            facts = await engine.load()
        except BaseException:
            await engine.give_up("the load was given up", 5.0)
            raise
        return ReadyModel(name, engine, facts, ModelSpec(name))

    async def begin(self, name: str, tokens: int = 3) -> Inbox:
        """A request of a client, posted; as the service does it."""
        while True:
            async with self.hub.use(name, ReadyModel) as model:
                inbox = Inbox(UnreadOutput(2**20))
                try:
                    model.engine.submit([Generate(next(self._numbers), (1, 2, 3), tokens)], inbox)
                except EngineGone:
                    pass
                else:
                    return inbox
            await model.engine.wait_gone()

    async def ask(self, name: str, tokens: int = 3) -> RequestEvent:
        """A whole request; its last event."""
        return await last_of(await self.begin(name, tokens))

    def state(self, name: str) -> str:
        return self.hub.card(name).state

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - the hub tells nobody
            await asyncio.sleep(0.005)


async def last_of(inbox: Inbox) -> RequestEvent:
    from millstream.engine.messages import Failed, Finished

    while True:
        for event in await inbox.take():
            if isinstance(event, Finished | Failed):
                return event
