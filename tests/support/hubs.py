"""A hub with fake backends, on the event loop of the test."""

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
from millstream.service.managed_model import LoadContext, ManagedModel
from millstream.service.ready_model import ReadyModel
from millstream.service.unread_output import UnreadOutput
from support.fake import FakeBackend

TIMEOUT = 60


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test with a timeout."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TIMEOUT))

    return run


class FakeHub:
    """A hub whose models are fakes of a given size. Records each load."""

    def __init__(self, *, every: float | None = None, **settings: Any) -> None:
        """`every`: seconds between two looks for idle models. It sets no limit for a step, as a short `step_timeout`
        would: a busy machine may take long for one."""
        self.hub = ModelHub(grace=1.0, patience=5.0, **settings)
        if every is not None:
            self.hub._watchdog.interval = every
        self.loads: list[str] = []
        self.backends: dict[str, BackendFactory] = {}
        self.before_reserve: Callable[[str], Awaitable[None]] | None = None
        self.before_load: Callable[[str], Awaitable[None]] | None = None
        self._numbers = iter(range(1, 10_000))

    def add(self, name: str, size: int = 10, *, load_now: bool = False, **spec: Any) -> ManagedModel:
        loader = functools.partial(self._load, name, size)
        return self.hub.add(name, ModelSpec(name, **spec), loader, isolation="thread", load_now=load_now)

    async def _load(self, name: str, size: int, context: LoadContext) -> ReadyModel:
        self.loads.append(name)
        if self.before_reserve is not None:
            await self.before_reserve(name)
        await context.reserve(size, size)
        if self.before_load is not None:
            await self.before_load(name)
        link = ThreadLink(
            name, self.backends.get(name, FakeBackend), lambda _: GenerationScheduler(max_rows=4, prefill_tokens=64)
        )
        engine = EngineClient(
            link,
            Admission(capacity=4, queue=100, fail_fast=False),
            on_progress=context.report_progress,
            on_idle=context.became_idle,
        )
        try:
            facts = await engine.load()
        except BaseException:
            await engine.abort_load("the load was aborted", 5.0)
            raise
        return ReadyModel(name, engine, facts, ModelSpec(name))

    async def begin(self, name: str, tokens: int = 3) -> Inbox:
        """Post a request as the service does; returns its inbox."""
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
        """Run a request to its end; returns its last event."""
        return await last_of(await self.begin(name, tokens))

    def state(self, name: str) -> str:
        return self.hub.card(name).state

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - the hub has no event for it
            await asyncio.sleep(0.005)


async def last_of(inbox: Inbox) -> RequestEvent:
    from millstream.engine.messages import Failed, Finished

    while True:
        for event in await inbox.take():
            if isinstance(event, Finished | Failed):
                return event
