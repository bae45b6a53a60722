"""Starts engines of any kind, on a thread or in a process, and stops them with the server."""

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
from millstream.service.managed_model import LoadContext
from millstream.service.memory_budget import gib

log = logging.getLogger(__name__)


class Engines:
    """All engines of a server. A thread whose engine has ended is reused for the next one."""

    def __init__(self, stop_patience: float) -> None:
        """`stop_patience`: seconds that an engine has to stop after its load was cancelled."""
        self._stop_patience = stop_patience
        self._threads = OwnerThreads()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()

    async def start(
        self,
        name: str,
        backend: BackendFactory,
        scheduler: SchedulerFactory,
        admission: Admission,
        loading: LoadContext,
        *,
        isolated: bool,
    ) -> tuple[EngineClient, ModelFacts]:
        """Starts an owner and loads a model on it. The owner calls both factories; for a process they are pickled."""
        link: Link
        if isolated:
            link = ProcessLink(name, backend, scheduler)
        else:
            link = ThreadLink(name, backend, scheduler, self._threads)
        self._links.add(link)
        started = time.monotonic()
        engine = EngineClient(link, admission, on_progress=loading.report_progress, on_idle=loading.became_idle)
        try:
            facts = await engine.load()
        except BaseException:
            await engine.abort_load("the load was cancelled", self._stop_patience)
            raise
        log.info(
            "%s: loaded in %.1f s on %s: %s of weights; %s",
            name, time.monotonic() - started, facts.device, gib(facts.weight_bytes), facts.summary,
        )  # fmt: skip
        return engine, facts

    async def close(self) -> None:
        """Ends the owner threads. Call it after all engines have stopped."""
        await asyncio.to_thread(self._threads.close)

    def kill(self, reason: str) -> None:
        """Disowns all engines without waiting. Processes are killed; threads cannot be."""
        for link in list(self._links):
            link.disown(reason)
