"""Starts engines of any kind, on a thread or in a process, and ends them with the server."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref

from millstream.engine.link import Link, ThreadLink
from millstream.engine.owner_threads import OwnerThreads
from millstream.engine.process_link import ProcessLink
from millstream.engine.protocols import BackendFactory, SchedulerFactory
from millstream.model_facts import ModelFacts
from millstream.service.admission import Admission
from millstream.service.engine_client import EngineClient
from millstream.service.managed_model import Loading
from millstream.service.memory_budget import gib

log = logging.getLogger(__name__)


class Engines:
    """All engines of a server. A thread whose engine has ended serves the next one."""

    def __init__(self, stop_patience: float) -> None:
        """`stop_patience`: seconds for an engine whose load was given up to end."""
        self._stop_patience = stop_patience
        self._threads = OwnerThreads()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()

    async def start(
        self,
        name: str,
        backend: BackendFactory,
        scheduler: SchedulerFactory,
        admission: Admission,
        loading: Loading,
        *,
        isolated: bool,
    ) -> tuple[EngineClient, ModelFacts]:
        """Load a model on an owner of its own. Both factories are called there; for a process they are pickled."""
        link: Link
        if isolated:
            link = ProcessLink(name, backend, scheduler)
        else:
            link = ThreadLink(name, backend, scheduler, self._threads)
        self._links.add(link)
        started = time.monotonic()
        engine = EngineClient(link, admission, on_progress=loading.progress, on_idle=loading.idle)
        try:
            facts = await engine.load()
        except BaseException:
            await engine.give_up("the load was given up", self._stop_patience)
            raise
        log.info(
            "%s: loaded in %.1f s on %s: %s of weights; %s",
            name, time.monotonic() - started, facts.device, gib(facts.weight_bytes), facts.summary,
        )  # fmt: skip
        return engine, facts

    async def close(self) -> None:
        """After all engines have stopped: end their threads."""
        await asyncio.to_thread(self._threads.close)

    def kill(self, reason: str) -> None:
        """End all engines without waiting, as far as that is possible: those in processes are gone."""
        for link in list(self._links):
            link.disown(reason)
