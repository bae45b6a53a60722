"""The one place that joins all floors: from settings to a running server."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

from millstream.backend.environment import load_blas, prefer_known_kernels
from millstream.config import Settings
from millstream.engine.backend import BatchBackend
from millstream.engine.link import Link, ThreadLink
from millstream.engine.pace import Pace
from millstream.engine.process_link import ProcessLink
from millstream.engine.scheduler import Scheduler
from millstream.models.source import ModelSource, resolve
from millstream.service.admission import Admission
from millstream.service.engine_client import EngineClient
from millstream.service.hub import ModelHub, ReadyModel
from millstream.service.metrics import Metrics
from millstream.service.text_service import MillstreamService
from millstream.text.loading import load_tokenizer
from millstream.types import ModelFacts

log = logging.getLogger(__name__)

T = TypeVar("T")

BackendMaker = Callable[[ModelSource, Settings], BatchBackend]
"""Called on the owner thread."""

PREFILL = {"cpu": (256, 128, 4), "gpu": (2048, 256, 256)}
"""Prompt tokens a step; and, for one prompt beside running rows, the most and the least. A GPU's step costs the host
much the same for 300 tokens and for 3,000, so prompts share steps, and every new shape costs it milliseconds, so chunks
are of one length. On the CPU a token costs what it costs, and chunks follow the pace of the rows."""


class Mill:
    """A hub and its service, made on a running event loop. `pool` does blocking work: files, templates, tokenising."""

    def __init__(self, settings: Settings, pool: Executor, make_backend: BackendMaker) -> None:
        self._settings = settings
        self._make_backend = make_backend
        self._pool = pool
        self._metrics = Metrics()
        self.hub = ModelHub()
        self.service = MillstreamService(self.hub, pool, self._metrics)
        self._work: list[Future[Any]] = []

    def open(self, name: str, spec: str | None) -> None:
        """Begin to find and load a model. The server answers meanwhile."""
        self.hub.add(name, functools.partial(self._open, name, spec))

    async def close(self, reason: str) -> bool:
        """True if every engine freed its model in time and no download is left running."""
        freed = await self.hub.close(reason, self._settings.grace, self._settings.stop_patience)
        return freed and not any(future.running() for future in self._work)

    async def _open(self, name: str, spec: str | None) -> ReadyModel:
        report = functools.partial(log.info, "%s: %s", name)
        find = functools.partial(resolve, spec, cache_dir=self._settings.cache_dir, report=report)
        source = await self._in_pool(find)
        tokenizer = await self._in_pool(functools.partial(load_tokenizer, source))
        started = time.monotonic()
        engine = EngineClient(
            self._link(name, source),
            Admission(rows=self._settings.max_batch, queue=self._settings.queue, fail_fast=self._settings.fail_fast),
        )
        try:
            facts = await engine.load()
        except asyncio.CancelledError:
            await engine.stop("the server is shutting down", self._settings.stop_patience)
            raise
        self._metrics.watch(name, lambda: engine.admission.active, lambda: engine.admission.waiting)
        self._announce(name, facts, time.monotonic() - started)
        for note in tokenizer.notes:
            log.warning("%s: tokenizer: %s", name, note)
        return ReadyModel(name, engine, tokenizer, facts)

    def _link(self, name: str, source: ModelSource) -> Link:
        kind = ProcessLink if self._settings.isolated else ThreadLink
        backend = functools.partial(self._make_backend, source, self._settings)
        return kind(name, backend, functools.partial(make_scheduler, self._settings.prefill_chunk))

    async def _in_pool(self, work: Callable[[], T]) -> T:
        future = self._pool.submit(work)
        self._work.append(future)
        try:
            return await asyncio.wrap_future(future)
        finally:
            if not future.running():
                self._work.remove(future)

    def _announce(self, name: str, facts: ModelFacts, seconds: float) -> None:
        log.info(
            "%s: loaded in %.1f s on %s; %s weights, %.2f GiB; context %d, %d rows",
            name,
            seconds,
            facts.device,
            facts.dtype,
            facts.weight_bytes / 2**30,
            facts.context_length,
            facts.max_rows,
        )
        for note in facts.notes:
            log.info("%s: %s", name, note)


def make_scheduler(chunk: int | None, facts: ModelFacts) -> Scheduler:
    budget, most, least = PREFILL["cpu" if facts.device.startswith("cpu") else "gpu"]
    most = chunk or most
    pace = Pace(most=most, least=min(least, most))
    return Scheduler(max_rows=facts.max_rows, prefill_tokens=max(most, budget), pace=pace)


def text_backend(source: ModelSource, settings: Settings) -> BatchBackend:
    """Called on the owner thread: MLX is imported there, and the stream is made there."""
    blas = load_blas(settings.blas)
    prefer_known_kernels()
    from millstream.backend.device import use_device
    from millstream.backend.text_model import MlxTextBackend, TextModelSettings

    use_device(settings.device)
    return MlxTextBackend(
        TextModelSettings(
            source.kind,
            Path(source.path),
            max_rows=settings.max_batch,
            unpack=settings.unpack,
            disabled=settings.disabled,
            blas=blas,
        )
    )
