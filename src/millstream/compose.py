"""Composes a server from its settings: the hub, the loaders and the services. The one place that joins all rooms."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import Executor, ThreadPoolExecutor

from millstream.config import ModelSpec, Settings
from millstream.loading.backends import BackendMaker
from millstream.loading.engines import Engines
from millstream.loading.models import ModelLoader
from millstream.media.limits import MediaLimits
from millstream.media.resolver import Resolver
from millstream.models.source import name_of
from millstream.service.encoding.service import MAX_VECTOR_BYTES, TextEncoder
from millstream.service.generation.grammar_checks import GrammarChecks
from millstream.service.generation.metrics import GenerationMetrics
from millstream.service.generation.service import TextGenerator
from millstream.service.hub import ModelHub, card_of
from millstream.service.managed_model import ManagedModel, report_defect
from millstream.service.mcp.servers import McpServers
from millstream.service.media.files import MAX_AV_DECODES, MAX_IMAGE_DECODES, MediaFiles
from millstream.service.media.memory import MediaMemory
from millstream.service.metrics import Metrics
from millstream.service.models import ModelOperations
from millstream.service.ports import RecordStore, Seal, Services
from millstream.service.store.directory import prepare, seal_key
from millstream.service.store.files import RecordFiles
from millstream.service.store.folder import RecordFolder
from millstream.service.store.memory import MemoryRecords
from millstream.service.store.seal import SecretKeySeal
from millstream.service.unread_output import UnreadOutput


class Mill:
    """A hub and its services, made on a running event loop.

    `pool` does blocking work: files, tokenising, images. `network` waits for other machines, and `resolver` for DNS.
    """

    def __init__(
        self, settings: Settings, pool: Executor, network: Executor, resolver: Executor, make_backend: BackendMaker
    ) -> None:
        self._settings = settings
        self._tool_servers = McpServers(settings.tool_servers)
        self._store_worker = ThreadPoolExecutor(1, thread_name_prefix="store")
        seal, records = _store(settings, self._store_worker)
        self._metrics = Metrics()
        self.hub = ModelHub(
            memory=settings.memory,
            idle_unload=settings.idle_unload,
            step_timeout=settings.step_timeout,
            grace=settings.grace,
            patience=settings.stop_patience,
        )
        self._descriptions: set[asyncio.Task[None]] = set()
        limits = media_limits(settings)
        self._resolver = Resolver(resolver)
        self._grammars = GrammarChecks()
        self._engines = Engines(settings.stop_patience)
        self._loader = ModelLoader(settings, self._engines, pool, limits, make_backend)
        memory = MediaMemory(settings.media_memory, image_decodes=MAX_IMAGE_DECODES, av_decodes=MAX_AV_DECODES)
        generation = TextGenerator(
            self.hub,
            pool,
            MediaFiles(limits, memory, pool, network, self._resolver),
            self._grammars,
            UnreadOutput(settings.unread_output),
            GenerationMetrics(self._metrics),
        )
        self.services = Services(
            models=ModelOperations(self.hub, self._metrics),
            generation=generation,
            encoding=TextEncoder(self.hub, pool, UnreadOutput(MAX_VECTOR_BYTES)),
            seal=seal,
            records=records,
            tool_servers=self._tool_servers,
        )
        self._tool_servers.start()

    def add(self, spec: ModelSpec) -> None:
        """Serve a model. If it is loaded now, the server answers meanwhile."""
        name = spec.name or name_of(spec.source)
        isolation = "process" if self._settings.isolated(spec) else "thread"
        load_now = (spec.load or self._settings.load) == "start"
        model = self.hub.add(
            name, spec, functools.partial(self._loader.open, name, spec), isolation=isolation, load_now=load_now
        )
        self._metrics.watch(name, lambda: card_of(model))
        if not load_now:
            task = asyncio.ensure_future(self._describe(model))
            self._descriptions.add(task)
            task.add_done_callback(self._descriptions.discard)
            task.add_done_callback(report_defect)

    async def _describe(self, model: ManagedModel) -> None:
        """Fills in what the files of a model say about it before it is loaded for the first time."""
        description = await self._loader.describe(model.spec)
        if not model.loads:
            model.description = description

    async def close(self, reason: str) -> bool:
        """True if every engine freed its model in time and no download or DNS look-up is left running."""
        for task in self._descriptions:
            task.cancel()
        freed = await self.hub.close(reason, self._settings.grace, self._settings.stop_patience)
        await self._tool_servers.close()
        self._store_worker.shutdown(wait=False)
        await self._engines.close()
        await self._grammars.close()
        await self._loader.close()
        if freed:
            await self._loader.wait_closed()
        return freed and not self._resolver.hanging and not self._loader.working

    def kill(self, reason: str) -> None:
        """End all engines and tool servers without waiting, as far as that is possible: those in processes are gone."""
        self._engines.kill(reason)
        self._tool_servers.kill()


def _store(settings: Settings, worker: Executor) -> tuple[Seal, RecordStore]:
    """What clients hold or ask for again: with a folder, a restart finds it. `worker` has one thread."""
    size, age = settings.store_size, settings.record_seconds
    if settings.store_dir is None:
        return SecretKeySeal(), MemoryRecords(max_bytes=size, max_age=age)
    folder = RecordFolder(prepare(settings.store_dir), max_bytes=size, max_age=age)
    return SecretKeySeal(seal_key(settings.store_dir)), RecordFiles(folder, worker)


def media_limits(settings: Settings) -> MediaLimits:
    return MediaLimits(
        file_bytes=settings.media_bytes,
        pixels=settings.media_pixels,
        count=settings.media_count,
        timeout=settings.media_timeout,
        folders=settings.media_folders,
        allow_private=settings.allow_private_media,
        audio_seconds=settings.media_seconds,
    )
