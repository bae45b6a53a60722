"""Loads a model that generates text: its files, tokenizer, chat template, media processor and engine."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
import logging
import re
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

from millstream.config import ModelSpec, Settings
from millstream.engine.generation.tuning import DiskTierConfig, SchedulerSettings, limit_context, make_scheduler
from millstream.errors import ModelError
from millstream.loading.backends import BackendMaker
from millstream.loading.engines import Engines
from millstream.loading.memory import footprint
from millstream.loading.settings import engine_settings, kv_bits, max_batch
from millstream.media.limits import MediaLimits
from millstream.media.port import MediaPreprocessor
from millstream.model_facts import GenerationFacts
from millstream.models.checks import check_model
from millstream.models.demo import user_cache_dir
from millstream.models.estimate import estimate, expected_device
from millstream.models.source import ModelSource, resolve
from millstream.service.admission import Admission
from millstream.service.engine_client import EngineClient
from millstream.service.generation.model import GenerationModel
from millstream.service.generation.template_host import TemplateHost
from millstream.service.managed_model import Loading
from millstream.service.memory_budget import gib
from millstream.text.chat_format import ChatFormat, detect_chat_format
from millstream.text.control_tokens import ControlTokens
from millstream.text.loading import load_tokenizer
from millstream.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

WRONG_SETTINGS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)
"""What reading settings of wrong types raises."""


class GenerationLoader:
    """Opens models one by one; `pool` does the blocking work: files, tokenizers, processors."""

    def __init__(
        self, settings: Settings, engines: Engines, pool: Executor, limits: MediaLimits, make_backend: BackendMaker
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._pool = pool
        self._limits = limits
        self._make_backend = make_backend
        self._work: set[Future[Any]] = set()
        """Work on the pool, also that of loads that were given up."""
        self._templates: set[TemplateHost] = set()
        self._followers: set[asyncio.Task[None]] = set()

    @property
    def working(self) -> bool:
        """True if a download or another piece of blocking work is still running."""
        return any(future.running() for future in list(self._work))

    async def open(self, name: str, spec: ModelSpec, loading: Loading) -> GenerationModel:
        """The model, ready to serve. Raises `ModelError` if it cannot be loaded."""
        report = functools.partial(log.info, "%s: %s", name)
        find = functools.partial(resolve, spec.source, cache_dir=self._settings.cache_dir, report=report)
        source = await self._in_pool(find)
        await self._in_pool(functools.partial(check_model, source.kind, source.path))
        tokenizer = await self._in_pool(functools.partial(load_tokenizer, source))
        chat_format = self._chat_format(spec, tokenizer)
        preprocessor = await self._in_pool(functools.partial(media_preprocessor, source, tokenizer, self._limits))
        control = await self._control_tokens(spec, tokenizer, chat_format, preprocessor)
        memory = await self._reserve(name, spec, source, loading)
        template = TemplateHost(tokenizer.template, self._pool)
        self._templates.add(template)  # from now on: the server may stop while this load is being given up
        try:
            await template.open()
            engine, facts = await self._start_engine(name, spec, source, memory, loading)
        except BaseException:
            await self._close_template(template)
            raise
        self._close_with(engine, template)
        for note in facts.notes:
            log.info("%s: %s", name, note)
        for note in (*tokenizer.notes, *([template.note] if template.note and tokenizer.template else [])):
            log.warning("%s: tokenizer: %s", name, note)
        log.info("%s: tool calls: %s; reasoning: %s", name, *chat_format.names)
        # Media that the engine cannot encode are refused before they are fetched.
        usable = preprocessor if facts.media else None
        return GenerationModel(
            name,
            engine,
            facts,
            spec,
            tokenizer,
            chat_format=chat_format,
            preprocessor=usable,
            template=template,
            control=control,
        )

    async def close(self) -> None:
        """End the template processes that are left."""
        await asyncio.gather(*(template.close() for template in list(self._templates)))

    async def wait_closed(self) -> None:
        """After all engines have stopped: until their template processes have, too."""
        if self._followers:
            await asyncio.wait(self._followers)

    async def _start_engine(
        self, name: str, spec: ModelSpec, source: ModelSource, memory: int | None, loading: Loading
    ) -> tuple[EngineClient, GenerationFacts]:
        settings = self._settings
        scheduler = SchedulerSettings(
            settings.prefill_chunk, memory, settings.prefix_cache_memory, self._disk_tier(name, source)
        )
        engine, facts = await self._engines.start(
            name,
            functools.partial(self._make_backend, source, engine_settings(settings, spec)),
            functools.partial(make_scheduler, scheduler),
            Admission(capacity=max_batch(settings, spec), queue=settings.queue, fail_fast=settings.fail_fast),
            loading,
            isolated=settings.isolated(spec),
        )
        assert isinstance(facts, GenerationFacts)
        return engine, limit_context(facts, memory, settings.prefix_cache_memory)

    async def _close_template(self, template: TemplateHost) -> None:
        await template.close()
        self._templates.discard(template)

    def _close_with(self, engine: EngineClient, template: TemplateHost) -> None:
        """The template's process ends when its engine ends, however that happens."""

        async def follow() -> None:
            await engine.wait_gone()
            await self._close_template(template)

        task = asyncio.ensure_future(follow())
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)

    async def _control_tokens(
        self, spec: ModelSpec, tokenizer: Tokenizer, chat_format: ChatFormat, preprocessor: MediaPreprocessor | None
    ) -> ControlTokens | None:
        own = spec.allow_special_tokens
        if self._settings.allow_special_tokens if own is None else own:
            return None
        media = [] if preprocessor is None else [mark.text for mark in preprocessor.placeholders.values()]
        return await self._in_pool(functools.partial(tokenizer.control_tokens, [*chat_format.markers, *media]))

    def _chat_format(self, spec: ModelSpec, tokenizer: Tokenizer) -> ChatFormat:
        return detect_chat_format(
            tokenizer.template.source if tokenizer.template else None,
            lambda token: tokenizer.token_id(token) is not None,
            tools=spec.tool_format or self._settings.tool_format,
            reasoning=spec.reasoning_format or self._settings.reasoning_format,
        )

    async def _reserve(self, name: str, spec: ModelSpec, source: ModelSource, loading: Loading) -> int | None:
        """The memory that the model may take in all; None if there is no budget."""
        settings = self._settings
        if settings.memory is None:
            return None
        work = functools.partial(
            estimate,
            source,
            device=expected_device(settings.device),
            unpack=settings.unpack,
            kv_bits=kv_bits(settings, spec),
        )
        guess = await self._in_pool(work)
        least, want = footprint(guess, rows=max_batch(settings, spec), kv_memory=spec.kv_memory)
        granted = await loading.reserve(least, want)
        log.info(
            "%s: about %s of weights and %d bytes of KV cache per token; granted %s", name, gib(guess.weight_bytes),
            guess.kv_bytes_per_token, gib(granted),
        )  # fmt: skip
        return granted

    def _disk_tier(self, name: str, source: ModelSource) -> DiskTierConfig | None:
        """One folder per model. A model that has changed removes the files of its earlier version."""
        if not self._settings.prefix_cache_disk:
            return None
        path_hash = hashlib.sha256(str(source.path).encode()).hexdigest()[:12]
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80]
        folder = (self._settings.cache_dir or user_cache_dir()) / "prefixes" / f"{plain}-{path_hash}"
        return DiskTierConfig(folder, self._settings.prefix_cache_disk)

    async def _in_pool(self, work: Callable[[], T]) -> T:
        future = self._pool.submit(work)
        self._work.add(future)
        future.add_done_callback(self._work.discard)
        return await asyncio.wrap_future(future)


def media_preprocessor(source: ModelSource, tokenizer: Tokenizer, limits: MediaLimits) -> MediaPreprocessor | None:
    """Prepares the media of a model that takes them. Text models need neither an image library nor mlx-vlm, and without
    these a vision model is served for text alone, if at all."""
    if source.kind == "gguf" or not all(importlib.util.find_spec(name) for name in ("PIL", "mlx_vlm")):
        return None
    from millstream.media.preprocessor import load_preprocessor

    try:
        return load_preprocessor(Path(source.path), tokenizer.token_bytes, limits)
    except WRONG_SETTINGS as error:
        raise ModelError(f"{source.path}: its image processor settings cannot be used: {error}") from error
