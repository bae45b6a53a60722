"""Composes a server from its settings: the hub, the loaders and the services. The one place that joins all rooms."""

from __future__ import annotations

import functools
from concurrent.futures import Executor

from millstream.config import ModelSpec, Settings
from millstream.loading.backends import BackendMaker
from millstream.loading.engines import Engines
from millstream.loading.generation import GenerationLoader
from millstream.media.limits import MediaLimits
from millstream.media.resolver import Resolver
from millstream.models.source import name_of
from millstream.service.generation.grammar_checks import GrammarChecks
from millstream.service.generation.metrics import GenerationMetrics
from millstream.service.generation.service import TextGenerator
from millstream.service.hub import ModelHub, card_of
from millstream.service.media.files import MAX_AV_DECODES, MAX_IMAGE_DECODES, MediaFiles
from millstream.service.media.memory import MediaMemory
from millstream.service.metrics import Metrics
from millstream.service.models import ModelOperations
from millstream.service.ports import Services
from millstream.service.unread_output import UnreadOutput


class Mill:
    """A hub and its services, made on a running event loop.

    `pool` does blocking work: files, tokenising, images. `network` waits for other machines, and `resolver` for DNS.
    """

    def __init__(
        self, settings: Settings, pool: Executor, network: Executor, resolver: Executor, make_backend: BackendMaker
    ) -> None:
        self._settings = settings
        self._metrics = Metrics()
        self.hub = ModelHub(
            memory=settings.memory,
            idle_unload=settings.idle_unload,
            step_timeout=settings.step_timeout,
            grace=settings.grace,
            patience=settings.stop_patience,
        )
        limits = media_limits(settings)
        self._resolver = Resolver(resolver)
        self._grammars = GrammarChecks()
        self._engines = Engines(settings.stop_patience)
        self._loader = GenerationLoader(settings, self._engines, pool, limits, make_backend)
        memory = MediaMemory(settings.media_memory, image_decodes=MAX_IMAGE_DECODES, av_decodes=MAX_AV_DECODES)
        generation = TextGenerator(
            self.hub,
            pool,
            MediaFiles(limits, memory, pool, network, self._resolver),
            self._grammars,
            UnreadOutput(settings.unread_output),
            GenerationMetrics(self._metrics),
        )
        self.services = Services(models=ModelOperations(self.hub, self._metrics), generation=generation)

    def add(self, spec: ModelSpec) -> None:
        """Serve a model. If it is loaded now, the server answers meanwhile."""
        name = spec.name or name_of(spec.source)
        isolation = "process" if self._settings.isolated(spec) else "thread"
        now = (spec.load or self._settings.load) == "start"
        model = self.hub.add(name, spec, functools.partial(self._loader.open, name, spec), isolation=isolation, now=now)
        self._metrics.watch(name, lambda: card_of(model))

    async def close(self, reason: str) -> bool:
        """True if every engine freed its model in time and no download or DNS look-up is left running."""
        freed = await self.hub.close(reason, self._settings.grace, self._settings.stop_patience)
        await self._engines.close()
        await self._grammars.close()
        await self._loader.close()
        if freed:
            await self._loader.wait_closed()
        return freed and not self._resolver.hanging and not self._loader.working

    def kill(self, reason: str) -> None:
        """End all engines without waiting, as far as that is possible: those in processes are gone."""
        self._engines.kill(reason)


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
