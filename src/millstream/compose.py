"""The one place that joins all floors: from settings to a running server."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import importlib.util
import logging
import re
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

from millstream.backend.environment import avoid_cudnn_attention, load_blas, share_cores
from millstream.backend.open_files import preserve_open_files
from millstream.config import ModelSpec, Settings
from millstream.engine.generation.backend import GenerationBackend
from millstream.engine.generation.tuning import DiskTierConfig, limit_context, make_scheduler
from millstream.engine.link import Link, ThreadLink
from millstream.engine.owner_threads import OwnerThreads
from millstream.engine.process_link import ProcessLink
from millstream.errors import ModelError
from millstream.media.limits import MediaLimits
from millstream.media.port import MediaPreprocessor
from millstream.media.resolver import Resolver
from millstream.models.checks import check_model
from millstream.models.demo import user_cache_dir
from millstream.models.estimate import Estimate, estimate, expected_device
from millstream.models.source import ModelSource, name_of, resolve
from millstream.service.admission import Admission
from millstream.service.engine_client import EngineClient
from millstream.service.generation.grammar_checks import GrammarChecks
from millstream.service.generation.service import MillstreamService
from millstream.service.generation.template_host import TemplateHost
from millstream.service.hub import ModelHub, card_of
from millstream.service.managed_model import Loading, ReadyModel
from millstream.service.media.files import DECODED, IMAGES, MediaFiles
from millstream.service.media.memory import MediaMemory
from millstream.service.memory_budget import gib
from millstream.service.metrics import Metrics
from millstream.service.unread_output import UnreadOutput
from millstream.text.control_tokens import ControlTokens
from millstream.text.grammar import compiler_of
from millstream.text.loading import load_tokenizer
from millstream.text.style import Style, choose_style
from millstream.text.tokenizer import Tokenizer
from millstream.types import LEAST_TOKENS, ModelFacts

log = logging.getLogger(__name__)

T = TypeVar("T")

BackendMaker = Callable[[ModelSource, Settings], GenerationBackend]
"""Called on the owner thread."""

USUAL_TOKENS = 16_384
"""Tokens that a model gets memory for, all rows together, under a budget that does not say otherwise."""

LONG_TOKENS = 32_768
"""The longest context that is provided for unasked."""

WRONG_SETTINGS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)
"""What reading settings of wrong types raises."""

FEATURE_BYTES = 256 * 2**20
"""For encoded images, each kept for the next question about it."""


class Mill:
    """A hub and its service, made on a running event loop. `pool` does blocking work: files, templates, tokenising,
    images; `network` waits for other machines, and `names` for what the system says of their names."""

    def __init__(
        self, settings: Settings, pool: Executor, network: Executor, names: Executor, make_backend: BackendMaker
    ) -> None:
        self._settings = settings
        self._make_backend = make_backend
        self._pool = pool
        self._metrics = Metrics()
        self.hub = ModelHub(
            memory=settings.memory,
            idle_unload=settings.idle_unload,
            step_timeout=settings.step_timeout,
            grace=settings.grace,
            patience=settings.stop_patience,
        )
        self._limits = media_limits(settings)
        self._names = Resolver(names)
        self._grammars = GrammarChecks()
        memory = MediaMemory(settings.media_memory, images=IMAGES, others=DECODED)
        files = MediaFiles(self._limits, memory, pool, network, self._names)
        unread = UnreadOutput(settings.unread_output)
        self.service = MillstreamService(self.hub, pool, files, self._grammars, unread, self._metrics)
        self._work: set[Future[Any]] = set()
        self._owner_threads = OwnerThreads()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._templates: set[TemplateHost] = set()
        self._followers: set[asyncio.Task[None]] = set()

    def add(self, spec: ModelSpec) -> None:
        """Serve a model. If it is loaded now, the server answers meanwhile."""
        name = spec.name or name_of(spec.source)
        isolation = "process" if self._settings.isolated(spec) else "thread"
        now = (spec.load or self._settings.load) == "start"
        entry = self.hub.add(name, spec, functools.partial(self._open, name, spec), isolation=isolation, now=now)
        self._metrics.watch(name, lambda: card_of(entry))

    async def close(self, reason: str) -> bool:
        """True if every engine freed its model in time and no download or look-up is left running."""
        freed = await self.hub.close(reason, self._settings.grace, self._settings.stop_patience)
        await asyncio.to_thread(self._owner_threads.close)
        await asyncio.gather(self._grammars.close(), *(template.close() for template in list(self._templates)))
        if freed and self._followers:
            await asyncio.wait(self._followers)
        return freed and not self._names.hanging and not any(future.running() for future in list(self._work))

    def kill(self, reason: str) -> None:
        """End all engines as far as that is possible without waiting: those in processes of their own are gone."""
        for link in list(self._links):
            link.disown(reason)

    async def _open(self, name: str, spec: ModelSpec, loading: Loading) -> ReadyModel:
        report = functools.partial(log.info, "%s: %s", name)
        find = functools.partial(resolve, spec.source, cache_dir=self._settings.cache_dir, report=report)
        source = await self._in_pool(find)
        await self._in_pool(functools.partial(check_model, source.kind, source.path))
        tokenizer = await self._in_pool(functools.partial(load_tokenizer, source))
        style = self._style(spec, tokenizer)
        reader = await self._in_pool(functools.partial(media_reader, source, tokenizer, self._limits))
        control = await self._control_tokens(spec, tokenizer, style, reader)
        granted = await self._make_room(name, spec, source, loading)
        template = TemplateHost(tokenizer.template, self._pool)
        self._templates.add(template)  # from now on: the server may end while this load is being given up
        try:
            await template.open()
            engine, facts = await self._start_engine(name, spec, source, granted, loading)
        except BaseException:
            await self._close_template(template)
            raise
        self._close_with(engine, template)
        for note in (*tokenizer.notes, *([template.note] if template.note and tokenizer.template else [])):
            log.warning("%s: tokenizer: %s", name, note)
        log.info("%s: tool calls: %s; thoughts: %s", name, *style.names)
        # What the engine cannot see is refused before it is fetched.
        sees = reader if facts.media else None
        return ReadyModel(name, engine, tokenizer, facts, spec, style, sees, template, control)

    async def _start_engine(
        self, name: str, spec: ModelSpec, source: ModelSource, granted: int | None, loading: Loading
    ) -> tuple[EngineClient, ModelFacts]:
        started = time.monotonic()
        engine = EngineClient(
            self._link(name, spec, source, granted),
            Admission(rows=self._rows(spec), queue=self._settings.queue, fail_fast=self._settings.fail_fast),
            on_progress=loading.progress,
            on_idle=loading.idle,
        )
        try:
            facts = limit_context(await engine.load(), granted, self._settings.prefix_cache_memory)
        except BaseException:
            await engine.give_up("the load was given up", self._settings.stop_patience)
            raise
        announce(name, facts, time.monotonic() - started)
        return engine, facts

    async def _close_template(self, template: TemplateHost) -> None:
        await template.close()
        self._templates.discard(template)

    def _close_with(self, engine: EngineClient, template: TemplateHost) -> None:
        """The template's process goes when its engine goes, however that ends."""

        async def follow() -> None:
            await engine.wait_gone()
            await self._close_template(template)

        task = asyncio.ensure_future(follow())
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)

    async def _control_tokens(
        self, spec: ModelSpec, tokenizer: Tokenizer, style: Style, reader: MediaPreprocessor | None
    ) -> ControlTokens | None:
        own = spec.allow_special_tokens
        if self._settings.allow_special_tokens if own is None else own:
            return None
        media = [mark.text for mark in reader.marks.values()] if reader is not None else []
        return await self._in_pool(functools.partial(tokenizer.control_tokens, [*style.markers, *media]))

    def _style(self, spec: ModelSpec, tokenizer: Tokenizer) -> Style:
        return choose_style(
            tokenizer.template.source if tokenizer.template else None,
            lambda token: tokenizer.token_id(token) is not None,
            tools=spec.tool_format or self._settings.tool_format,
            reasoning=spec.reasoning_format or self._settings.reasoning_format,
        )

    async def _make_room(self, name: str, spec: ModelSpec, source: ModelSource, loading: Loading) -> int | None:
        """What the model may take, all in all; None where there is no budget."""
        if self._settings.memory is None:
            return None
        device = expected_device(self._settings.device)
        work = functools.partial(
            estimate, source, device=device, unpack=self._settings.unpack, kv_bits=self._kv_bits(spec)
        )
        guess = await self._in_pool(work)
        least, want = footprint(guess, rows=self._rows(spec), kv_memory=spec.kv_memory)
        granted = await loading.make_room(least, want)
        log.info(
            "%s: about %s of weights and %d bytes a token; granted %s", name, gib(guess.weight_bytes),
            guess.kv_bytes_per_token, gib(granted),
        )  # fmt: skip
        return granted

    def _rows(self, spec: ModelSpec) -> int:
        return spec.max_batch or self._settings.max_batch

    def _kv_bits(self, spec: ModelSpec) -> int:
        return self._settings.kv_bits if spec.kv_bits is None else spec.kv_bits

    def _link(self, name: str, spec: ModelSpec, source: ModelSource, granted: int | None) -> Link:
        settings = dataclasses.replace(self._settings, max_batch=self._rows(spec), kv_bits=self._kv_bits(spec))
        backend = functools.partial(self._make_backend, source, settings)
        scheduler = functools.partial(
            make_scheduler, settings.prefill_chunk, granted, settings.prefix_cache_memory, self._disk(name, source)
        )
        link: Link
        if self._settings.isolated(spec):
            link = ProcessLink(name, backend, scheduler)
        else:
            link = ThreadLink(name, backend, scheduler, self._owner_threads)
        self._links.add(link)
        return link

    def _disk(self, name: str, source: ModelSource) -> DiskTierConfig | None:
        """A folder for each model. One that has changed has other files there, and removes those that were before."""
        if not self._settings.prefix_cache_disk:
            return None
        place = hashlib.sha256(str(source.path).encode()).hexdigest()[:12]
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80]
        folder = (self._settings.cache_dir or user_cache_dir()) / "prefixes" / f"{plain}-{place}"
        return DiskTierConfig(folder, self._settings.prefix_cache_disk)

    async def _in_pool(self, work: Callable[[], T]) -> T:
        future = self._pool.submit(work)
        self._work.add(future)
        future.add_done_callback(self._work.discard)  # also of a load that was given up meanwhile
        return await asyncio.wrap_future(future)


def media_limits(settings: Settings) -> MediaLimits:
    return MediaLimits(
        size=settings.media_bytes,
        pixels=settings.media_pixels,
        count=settings.media_count,
        seconds=settings.media_timeout,
        folders=settings.media_folders,
        private=settings.allow_private_media,
        sound=settings.media_seconds,
    )


def media_reader(source: ModelSource, tokenizer: Tokenizer, limits: MediaLimits) -> MediaPreprocessor | None:
    """What reads the images of a model that takes them. Text models need neither an image library nor mlx-vlm, and
    without them a vision model is served for text alone, if at all."""
    if source.kind == "gguf" or not all(importlib.util.find_spec(name) for name in ("PIL", "mlx_vlm")):
        return None
    from millstream.media.preprocessor import load_preprocessor

    try:
        return load_preprocessor(Path(source.path), tokenizer.token_bytes, limits)
    except WRONG_SETTINGS as error:
        raise ModelError(f"{source.path}: the settings for images cannot be used: {error}") from error


def announce(name: str, facts: ModelFacts, seconds: float) -> None:
    log.info(
        "%s: loaded in %.1f s on %s; %s weights, %s; %d bytes a token; context %d, %d rows",
        name,
        seconds,
        facts.device,
        facts.dtype,
        gib(facts.weight_bytes),
        facts.kv_bytes_per_token,
        facts.context_length,
        facts.max_rows,
    )
    for note in facts.notes:
        log.info("%s: %s", name, note)


def footprint(guess: Estimate, *, rows: int, kv_memory: int | None) -> tuple[int, int]:
    """The least that a model can be served with, and what it is given where there is enough."""
    context = guess.context_length or USUAL_TOKENS
    least = guess.weight_bytes + guess.kv_bytes_per_token * min(context, 2 * LEAST_TOKENS)
    # All of the context should fit one row at least; of the memory, rows get between a good third and three quarters.
    usual = guess.kv_bytes_per_token * max(min(rows * context, USUAL_TOKENS), min(context, LONG_TOKENS) * 8 // 3)
    return least, max(least, guess.weight_bytes + (usual if kv_memory is None else kv_memory))


def text_backend(source: ModelSource, settings: Settings) -> GenerationBackend:
    """Called on the owner thread: MLX is imported there, and the stream is made there."""
    if len(settings.specs) > 1:
        share_cores()
    blas = load_blas(settings.blas)
    avoid_cudnn_attention()
    with preserve_open_files():
        from millstream.backend.device import use_device
        from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend

    use_device(settings.device)
    return MlxGenerationBackend(
        GenerationSettings(
            source.kind,
            Path(source.path),
            max_rows=settings.max_batch,
            unpack=settings.unpack,
            disabled=settings.disabled,
            blas=blas,
            kv_bits=settings.kv_bits,
            cache_limit=None if settings.memory is None else settings.memory // 10,
            grammars=compiler_of(source),
            feature_bytes=FEATURE_BYTES if settings.memory is None else min(FEATURE_BYTES, settings.memory // 20),
        )
    )
