"""Composes a server from its settings: the hub, the loaders and the services. The one place that joins all rooms."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream.config import ConfigUpdate, ModelSpec, Settings
from millstream.deadline import Deadline
from millstream.errors import ModelError
from millstream.loading.backends import BackendMaker
from millstream.loading.engines import Engines
from millstream.loading.models import ModelLoader
from millstream.loading.reload_plan import plan_reload
from millstream.media.limits import MediaLimits
from millstream.media.resolver import Resolver
from millstream.models.demo import user_cache_dir
from millstream.models.disk_space import has_room
from millstream.models.source import name_of
from millstream.pools import Pools
from millstream.service.activity import Activities
from millstream.service.encoding.service import MAX_VECTOR_BYTES, TextEncoder
from millstream.service.encoding.timing import EncodingTimers
from millstream.service.generation.grammar_checks import GrammarChecks
from millstream.service.generation.metrics import GenerationMetrics
from millstream.service.generation.service import TextGenerator
from millstream.service.generation.timing import RequestTimers
from millstream.service.history import History
from millstream.service.hub import ModelHub, card_of
from millstream.service.journal import Journal
from millstream.service.managed_model import Loader, ManagedModel, report_defect
from millstream.service.mcp.servers import McpServers
from millstream.service.media.audio_files import AudioFiles
from millstream.service.media.files import MAX_AV_DECODES, MAX_IMAGE_DECODES, MediaFiles
from millstream.service.media.memory import MediaMemory
from millstream.service.metrics import Metrics
from millstream.service.models import ModelOperations
from millstream.service.ports import RecordStore, Seal, Services
from millstream.service.realtime.service import RealtimeSessions
from millstream.service.realtime.session import SessionServices
from millstream.service.request_log import log_request
from millstream.service.server_state import StateOperations
from millstream.service.speech.service import TextSpeaker
from millstream.service.speech.timing import SpeechTimers
from millstream.service.store.directory import prepare, seal_key
from millstream.service.store.files import RecordFiles
from millstream.service.store.folder import RecordFolder
from millstream.service.store.memory import MemoryRecords
from millstream.service.store.room import FolderRoom
from millstream.service.store.seal import SecretKeySeal
from millstream.service.telemetry.setup import open_telemetry
from millstream.service.transcription.service import Transcriber
from millstream.service.transcription.timing import TranscriptionTimers
from millstream.service.unread_output import UnreadOutput

log = logging.getLogger(__name__)

ENGINE_SECONDS = 5.0
"""After the grace time of a stop, for engines to complete their step and free their models."""
UNWRITTEN = "responses cannot be stored on disk now: they are kept in memory, until the server stops"
SPARE_BYTES = 64 * 2**20
"""For stored responses while their disk cannot be written."""
AUDIO_PATIENCE = 6
"""How many times longer than other media audio to transcribe may take to download and decode: it may be hours."""


class Mill:
    """A hub and its services, made on a running event loop."""

    def __init__(self, settings: Settings, pools: Pools, make_backend: BackendMaker) -> None:
        self._settings = settings
        self._pool = pool = pools.work
        self._specs: dict[str, ModelSpec] = {}
        """The models that are served, by name, in order."""
        self._derived_names: dict[str | None, str] = {}
        """Of models that set none, by source."""
        self._closing = False
        self._tool_servers = McpServers(settings.tool_servers)
        self._store_worker = ThreadPoolExecutor(1, thread_name_prefix="store")
        seal, self._records = _store(settings, self._store_worker)
        self._room = FolderRoom(_written_folders(settings), has_room, pools.waits)
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
        resolver = Resolver(pools.dns)
        self._grammars = GrammarChecks()
        self._engines = Engines(settings.stop_patience)
        self._loader = ModelLoader(settings, self._engines, pool, pools.waits, limits, make_backend)
        memory = MediaMemory(settings.media_memory, image_decodes=MAX_IMAGE_DECODES, av_decodes=MAX_AV_DECODES)
        activities = Activities()
        self._history = History(self.hub.cards, activities)
        self._telemetry = open_telemetry(settings.otel, os.environ)
        traces = () if self._telemetry is None else (self._telemetry.ended,)
        journal = Journal(log_request, self._history.ended, *traces)
        generation = TextGenerator(
            self.hub,
            pool,
            MediaFiles(limits, memory, pool, pools.network, resolver),
            self._grammars,
            UnreadOutput(settings.unread_output),
            RequestTimers(journal, GenerationMetrics(self._metrics), activities, log_content=settings.log_content),
        )
        models = ModelOperations(self.hub, self._metrics)
        transcription = Transcriber(
            self.hub,
            pool,
            AudioFiles(audio_limits(settings), memory, pool, pools.network, resolver),
            UnreadOutput(settings.unread_output),
            TranscriptionTimers(journal, self._metrics, activities),
        )
        speech = TextSpeaker(self.hub, pool, SpeechTimers(journal, self._metrics, activities))
        self.services = Services(
            models=models,
            generation=generation,
            encoding=TextEncoder(
                self.hub,
                pool,
                UnreadOutput(MAX_VECTOR_BYTES),
                EncodingTimers(journal, self._metrics, activities),
            ),
            transcription=transcription,
            speech=speech,
            realtime=RealtimeSessions(models, SessionServices(generation, transcription, speech)),
            seal=seal,
            records=self._records,
            tool_servers=self._tool_servers,
            state=StateOperations(self.hub, journal, self._history),
            problems=self._problems,
        )
        self._history.start()
        self._tool_servers.start()

    def add(self, spec: ModelSpec) -> None:
        """Serve a model. If it is loaded now, the server answers meanwhile."""
        name = spec.name or name_of(spec.source)
        if spec.name is None:
            self._derived_names[spec.source] = name
        model = self.hub.add(
            name, spec, self._loader_of(name, spec), isolation=self._isolation(spec), load_now=self._loads_now(spec)
        )
        self._specs[name] = replace(spec, name=name)
        self._metrics.watch(name, lambda: card_of(model))
        if not self._loads_now(spec):
            self._describe_soon(model)

    async def reload(self, update: ConfigUpdate) -> None:
        """Change the models to those of `update`. Requests of models that stay as they are notice nothing. Raises
        `ModelError`, before anything has changed, if two models have one name."""
        specs = Settings(models=update.models).specs
        unnamed = [spec.source for spec in specs if spec.name is None]
        names = await asyncio.wrap_future(self._pool.submit(_names_of, unnamed, self._derived_names))
        specs = tuple(replace(spec, name=spec.name or names[spec.source]) for spec in specs)
        _reject_duplicates(specs)
        if self._closing:
            return
        self._derived_names = names
        if update.needs_restart:
            options = ", ".join(update.needs_restart)
            log.warning("changed options that take effect when the server is started again: %s", options)
        plan = plan_reload(self._settings, tuple(self._specs.values()), specs)
        self._loader.serve_models(specs)
        for name in plan.removed:
            del self._specs[name]
            self.hub.remove(name, functools.partial(self._metrics.unwatch, name))
        for spec in (*plan.updated, *plan.reloaded):
            self._update(spec, reload=spec in plan.reloaded)
        for spec in plan.added:
            self.add(spec)
        self.hub.reorder(plan.order)
        self._specs = {name: self._specs[name] for name in plan.order}
        log.info("configuration reloaded: %s", plan)

    def _update(self, spec: ModelSpec, *, reload: bool) -> None:
        name = spec.name or ""
        load_now = self._loads_now(spec) and not self._loads_now(self._specs[name])
        self._specs[name] = spec
        model = self.hub.update(
            name, spec, self._loader_of(name, spec), isolation=self._isolation(spec), reload=reload, load_now=load_now
        )
        if reload and model.model is None:
            model.loads = 0
            self._describe_soon(model)

    def _loader_of(self, name: str, spec: ModelSpec) -> Loader:
        return functools.partial(self._loader.open, name, spec)

    def _isolation(self, spec: ModelSpec) -> str:
        return "process" if self._settings.isolated(spec) else "thread"

    def _loads_now(self, spec: ModelSpec) -> bool:
        return (spec.load or self._settings.load) == "start"

    def _describe_soon(self, model: ManagedModel) -> None:
        task = asyncio.ensure_future(self._describe(model))
        self._descriptions.add(task)
        task.add_done_callback(self._descriptions.discard)
        task.add_done_callback(report_defect)

    async def _describe(self, model: ManagedModel) -> None:
        """Fills in what the files of a model say about it before it is loaded for the first time."""
        description = await self._loader.describe(model.spec)
        if not model.loads:
            model.description = description

    async def close(self, reason: str, end: Deadline) -> bool:
        """Running requests may take their grace time, and then everything is closed. True if it was in time."""
        self._closing = True
        self._history.close()
        for task in self._descriptions:
            task.cancel()
        patience = min(self._settings.stop_patience, ENGINE_SECONDS)
        freed = await self.hub.close(reason, self._settings.grace, patience)
        closing = {
            "the MCP servers": self._tool_servers.close(),
            "the threads of engines": self._engines.close(),
            "the processes that check grammars": self._grammars.close(),
            "the processes that render chat templates, or downloads": self._loader.close(),
        }
        if self._telemetry is not None:
            closing["telemetry"] = self._telemetry.close()
        return await ended_by(end, closing) and freed

    def close_store(self) -> None:
        """Call it once no task is left that stores something. What is handed over already is still written."""
        self._store_worker.shutdown(wait=False)

    def _problems(self) -> list[str]:
        unwritten = isinstance(self._records, RecordFiles) and self._records.fails
        return [*self._room.problems(), *([UNWRITTEN] if unwritten else [])]

    def kill(self, reason: str) -> None:
        """End all engines and tool servers without waiting, as far as that is possible: those in processes are gone."""
        self._engines.kill(reason)
        self._tool_servers.kill()


async def ended_by(end: Deadline, works: Mapping[str, Coroutine[Any, Any, None]]) -> bool:
    """Runs all of it at the same time: what hangs holds up nothing else. False if something failed or has not ended by
    then, which the log names."""
    tasks = {asyncio.ensure_future(work): name for name, work in works.items()}
    if not tasks:
        return True
    done, left = await asyncio.wait(tasks, timeout=end.left)
    failed = [task for task in done if not task.cancelled() and task.exception() is not None]
    for task in failed:
        log.error("stopping: %s failed", tasks[task], exc_info=task.exception())
    for task in left:
        log.warning("stopping: %s did not end in time", tasks[task])
    return not left and not failed


def _names_of(sources: Sequence[str | None], known: Mapping[str | None, str]) -> dict[str | None, str]:
    """Names by source. Looks at the disk, where a folder that is served may be gone: it keeps its name."""
    return {source: known.get(source) or name_of(source) for source in sources}


def _reject_duplicates(specs: Sequence[ModelSpec]) -> None:
    names = [name for spec in specs for name in (spec.name, *spec.aliases)]
    if twice := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ModelError(f"two models have the name or alias {', '.join(twice)}")


def _written_folders(settings: Settings) -> dict[str, Path]:
    """By what is told if there is no room."""
    full = "is on a disk that is full or cannot be written"
    folders = {
        f"the cache folder {full}: compiled kernels and prefixes of prompts are not kept, and models cannot be "
        "downloaded": settings.cache_dir or user_cache_dir(),
        f"the temporary folder {full}": Path(os.environ.get("TMPDIR", "/tmp")),
    }
    if settings.store_dir is not None:
        folders[f"the folder of stored responses {full}"] = settings.store_dir
    return folders


def _store(settings: Settings, worker: Executor) -> tuple[Seal, RecordStore]:
    """What clients hold or ask for again: with a folder, a restart finds it. `worker` has one thread."""
    size, age = settings.store_size, settings.record_seconds
    if settings.store_dir is None:
        return SecretKeySeal(), MemoryRecords(max_bytes=size, max_age=age)
    folder = RecordFolder(prepare(settings.store_dir), max_bytes=size, max_age=age)
    spare = MemoryRecords(max_bytes=min(size, SPARE_BYTES), max_age=age)
    return SecretKeySeal(seal_key(settings.store_dir)), RecordFiles(folder, worker, spare)


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


def audio_limits(settings: Settings) -> MediaLimits:
    """The limits of audio to transcribe."""
    return replace(
        media_limits(settings),
        file_bytes=settings.audio_bytes,
        bytes_option="--audio-bytes",
        timeout=settings.media_timeout * AUDIO_PATIENCE,
        audio_seconds=settings.audio_seconds,
        seconds_option="--audio-seconds",
    )
