"""Loads text generation models: files, tokenizer, chat template, media preprocessor and engine."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
import logging
import re
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from millstream.config import ModelSpec, Settings
from millstream.engine.generation.cost_model import describe as describe_costs
from millstream.engine.generation.tuning import DiskTierConfig, SchedulerSettings, limit_context, make_scheduler
from millstream.errors import DeviceLost, ModelError
from millstream.loading.backends import BackendMaker
from millstream.loading.description import describe
from millstream.loading.engines import Engines
from millstream.loading.memory import footprint
from millstream.loading.settings import engine_settings, kv_bits, max_batch
from millstream.loading.work import Work
from millstream.media.limits import MediaLimits
from millstream.media.port import MediaPreprocessor
from millstream.model_facts import GenerationFacts, ModelDescription
from millstream.models.demo import user_cache_dir
from millstream.models.estimate import estimate, expected_device
from millstream.models.sampling_defaults import sampling_defaults
from millstream.models.source import ModelSource
from millstream.service.admission import Admission
from millstream.service.engine_client import EngineClient
from millstream.service.generation.model import GenerationModel
from millstream.service.generation.template_host import TemplateHost
from millstream.service.managed_model import LoadContext
from millstream.service.memory_budget import gib
from millstream.text.chat_format import ChatFormat, detect_chat_format
from millstream.text.control_tokens import ControlTokens
from millstream.text.fill_in_middle import detect_fill_in_middle
from millstream.text.loading import load_tokenizer, read_chat_template
from millstream.text.same_vocabulary import different_tokens
from millstream.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SUSPECTS = ("fused-matmul", "kernel")
"""Fast paths with CUDA kernels of our own. If the device fails while a model is loaded in a process of its own, another
process loads it without the first one, then without both."""
BAD_CONFIG_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)
"""Raised when a preprocessor config has values of wrong types."""


class GenerationLoader:
    """Loads models. `work` runs the blocking work: tokenizers, preprocessors. `waits` waits for template processes."""

    def __init__(
        self,
        settings: Settings,
        engines: Engines,
        work: Work,
        waits: Executor,
        limits: MediaLimits,
        make_backend: BackendMaker,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._in_pool = work
        self._waits = waits
        self._limits = limits
        self._make_backend = make_backend
        self._templates: set[TemplateHost] = set()
        self._template_closers: set[asyncio.Task[None]] = set()

    def serve_models(self, models: tuple[ModelSpec, ...]) -> None:
        """Other models are served now. Later loads share the cores with them."""
        self._settings = replace(self._settings, models=models)

    async def open(
        self, name: str, spec: ModelSpec, source: ModelSource, loading: LoadContext, draft: ModelSource | None = None
    ) -> GenerationModel:
        """Loads a model and returns it, ready to serve. Raises `ModelError` if it cannot be loaded. `draft`: its draft
        model, which the same engine loads."""
        tokenizer = await self._in_pool(functools.partial(load_tokenizer, source))
        if draft is not None:
            await self._in_pool(functools.partial(_check_draft, tokenizer, draft))
        template_source = tokenizer.template.source if tokenizer.template else None
        chat_format = self._chat_format(spec, template_source, lambda token: tokenizer.token_id(token) is not None)
        preprocessor = await self._in_pool(functools.partial(media_preprocessor, source, tokenizer, self._limits))
        control = await self._control_tokens(spec, tokenizer, chat_format, preprocessor)
        memory = await self._reserve(name, spec, source, draft, loading)
        template = TemplateHost(tokenizer.template, self._waits)
        self._templates.add(template)  # before it starts: the server may stop while this load is being cancelled
        try:
            files = self._in_pool(functools.partial(describe, source, chat_format))
            described, _ = await asyncio.gather(files, template.open())
            engine, facts = await self._start_engine(name, spec, source, draft, memory, loading)
        except BaseException:
            await self._close_template(template)
            raise
        self._close_with(engine, template)
        for note in facts.notes:
            log.info("%s: %s", name, note)
        for line in describe_costs(facts):
            log.debug("%s: %s", name, line)
        for note in (*tokenizer.notes, *([template.note] if template.note and tokenizer.template else [])):
            log.warning("%s: tokenizer: %s", name, note)
        log.info("%s: tool calls: %s; reasoning: %s", name, *chat_format.names)
        for note in template.abilities.prefix_notes(reasons=chat_format.reasoning is not None):
            log.info("%s: chat template: %s, so a next turn reuses less of the prefix cache", name, note)
        sampling = await self._in_pool(functools.partial(sampling_defaults, source))
        if sampling:
            told = ", ".join(f"{each} {value:g}" for each, value in sampling)
            log.info("%s: sampling as its files recommend, unless a request or the configuration says: %s", name, told)
        # Without a preprocessor, media are refused before they are fetched.
        return GenerationModel(
            name,
            engine,
            facts,
            spec,
            tokenizer,
            chat_format=chat_format,
            preprocessor=preprocessor if facts.media else None,
            template=template,
            control=control,
            files=described,
            sampling=sampling,
            fim=detect_fill_in_middle(tokenizer),
        )

    def describe(self, spec: ModelSpec, source: ModelSource) -> ModelDescription:
        """Describes a model without loading it. Blocks, and raises what damaged files can raise."""
        return describe(source, self._chat_format(spec, read_chat_template(source), lambda token: False))

    async def close(self) -> None:
        """Stops the template processes that are left. Call it after all engines have stopped."""
        await asyncio.gather(*(self._close_template(template) for template in list(self._templates)))

    async def _start_engine(
        self,
        name: str,
        spec: ModelSpec,
        source: ModelSource,
        draft: ModelSource | None,
        memory: int | None,
        loading: LoadContext,
    ) -> tuple[EngineClient, GenerationFacts]:
        settings = self._settings
        scheduler = SchedulerSettings(
            settings.prefill_chunk,
            memory,
            settings.prefix_cache_memory,
            self._disk_tier(name, source),
            max_token_gap=settings.max_token_gap / 1000,
        )
        start = functools.partial(
            self._engines.start,
            name,
            scheduler=functools.partial(make_scheduler, scheduler),
            admission=Admission(capacity=max_batch(settings, spec), queue=settings.queue, fail_fast=settings.fail_fast),
            loading=loading,
            isolated=settings.isolated(spec),
        )
        own = replace(engine_settings(settings, spec), draft=draft)
        notes: tuple[str, ...] = ()
        while True:
            try:
                engine, facts = await start(functools.partial(self._make_backend, source, own))
                break
            except DeviceLost as error:
                suspect = next((path for path in SUSPECTS if path not in own.disabled), None)
                on_cuda = expected_device(settings.device) == "cuda"
                if suspect is None or not on_cuda or not settings.isolated(spec):
                    raise
                log.warning("%s: %s. Loading it again without %s", name, error.message, suspect)
                notes = (*notes, f"loaded without {suspect}, with which the load failed: {error.message}")
                own = replace(own, disabled=own.disabled | {suspect})
        assert isinstance(facts, GenerationFacts)
        facts = replace(facts, notes=(*facts.notes, *notes))
        return engine, limit_context(facts, memory, settings.prefix_cache_memory)

    async def _close_template(self, template: TemplateHost) -> None:
        await template.close()
        self._templates.discard(template)

    def _close_with(self, engine: EngineClient, template: TemplateHost) -> None:
        """Stops the template's process when the engine ends, for whatever reason."""

        async def close_after_engine() -> None:
            await engine.wait_gone()
            await self._close_template(template)

        task = asyncio.ensure_future(close_after_engine())
        self._template_closers.add(task)
        task.add_done_callback(self._template_closers.discard)

    async def _control_tokens(
        self, spec: ModelSpec, tokenizer: Tokenizer, chat_format: ChatFormat, preprocessor: MediaPreprocessor | None
    ) -> ControlTokens | None:
        """Returns the control tokens to escape in messages. None if clients may write control tokens."""
        allowed = spec.allow_special_tokens
        if self._settings.allow_special_tokens if allowed is None else allowed:
            return None
        media = [] if preprocessor is None else [each.text for each in preprocessor.placeholders.values()]
        return await self._in_pool(functools.partial(tokenizer.control_tokens, [*chat_format.markers, *media]))

    def _chat_format(self, spec: ModelSpec, template: str | None, has_token: Callable[[str], bool]) -> ChatFormat:
        return detect_chat_format(
            template,
            has_token,
            tools=spec.tool_format or self._settings.tool_format,
            reasoning=spec.reasoning_format or self._settings.reasoning_format,
        )

    async def _reserve(
        self, name: str, spec: ModelSpec, source: ModelSource, draft: ModelSource | None, loading: LoadContext
    ) -> int | None:
        """Reserves memory and returns the total that the model may use. Returns None if there is no memory budget."""
        settings = self._settings
        if settings.memory is None:
            return None
        work = functools.partial(estimate, device=expected_device(settings.device), unpack=settings.unpack)
        estimated = await self._in_pool(functools.partial(work, source, kv_bits=kv_bits(settings, spec)))
        if draft is not None:
            estimated += await self._in_pool(functools.partial(work, draft))
        minimum, wanted = footprint(estimated, rows=max_batch(settings, spec), kv_memory=spec.kv_memory)
        reserved = await loading.reserve(minimum, wanted)
        log.info(
            "%s: about %s of weights and %d bytes of KV cache per token; reserved %s",
            name, gib(estimated.weight_bytes), estimated.kv_bytes_per_token, gib(reserved),
        )  # fmt: skip
        return reserved

    def _disk_tier(self, name: str, source: ModelSource) -> DiskTierConfig | None:
        """Returns the folder and size of the disk tier. Each model has its own folder, and a changed model
        removes the files of its earlier version."""
        if not self._settings.prefix_cache_disk:
            return None
        path_hash = hashlib.sha256(str(source.path).encode()).hexdigest()[:12]
        safe_name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80]
        folder = (self._settings.cache_dir or user_cache_dir()) / "prefixes" / f"{safe_name}-{path_hash}"
        return DiskTierConfig(folder, self._settings.prefix_cache_disk)


def _check_draft(tokenizer: Tokenizer, draft: ModelSource) -> None:
    """Raises `ModelError` if the draft model has another vocabulary."""
    if difference := different_tokens(tokenizer, load_tokenizer(draft)):
        raise ModelError(f"{draft.path} cannot be the draft model: {difference}.")


def media_preprocessor(source: ModelSource, tokenizer: Tokenizer, limits: MediaLimits) -> MediaPreprocessor | None:
    """Returns a model's media preprocessor. Returns None for text models, or if Pillow or mlx-vlm is missing: a vision
    model then serves text only, if at all."""
    if source.kind == "gguf" or not all(importlib.util.find_spec(name) for name in ("PIL", "mlx_vlm")):
        return None
    from millstream.media.preprocessor import load_preprocessor

    try:
        return load_preprocessor(Path(source.path), tokenizer.token_bytes, limits)
    except BAD_CONFIG_ERRORS as error:
        raise ModelError(f"{source.path}: the preprocessor config cannot be used: {error}") from error
