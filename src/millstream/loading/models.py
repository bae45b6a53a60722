"""Loads models of every kind: finds their files, sees what they are for, and has them loaded by the loader of that
kind."""

from __future__ import annotations

import asyncio
import functools
import logging
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream.config import ModelSpec, Settings
from millstream.errors import ModelError
from millstream.loading.backends import BackendMaker
from millstream.loading.encoders import EncoderLoader, describe_encoder
from millstream.loading.engines import Engines
from millstream.loading.files import FileSearch
from millstream.loading.generation import GenerationLoader
from millstream.loading.settings import draft_of
from millstream.loading.speech import SpeechLoader, describe_speech
from millstream.loading.transcription import TranscriptionLoader, describe_transcriber
from millstream.loading.work import Work
from millstream.media.limits import MediaLimits
from millstream.model_facts import UNDESCRIBED, ModelDescription
from millstream.models.checks import check_model
from millstream.models.description import BAD_FILES
from millstream.models.encoder_layout import Kind, choose_kind, kind_of
from millstream.models.files import read_object
from millstream.models.source import ModelSource, find_local
from millstream.models.speech_layout import speech_family
from millstream.models.transcription_layout import transcription_family
from millstream.service.managed_model import LoadContext
from millstream.service.ready_model import ReadyModel

log = logging.getLogger(__name__)


class ModelLoader:
    """`pool` runs the work on local files: tokenizers, preprocessors. `waits` has a thread for each job that another
    machine or a child process may hold: downloads, chat templates."""

    def __init__(
        self,
        settings: Settings,
        engines: Engines,
        pool: Executor,
        waits: Executor,
        limits: MediaLimits,
        make_backend: BackendMaker,
    ) -> None:
        self._settings = settings
        self._work = Work(pool)
        self._searches = Work(waits)
        self._generation = GenerationLoader(settings, engines, self._work, waits, limits, make_backend)
        self._encoders = EncoderLoader(settings, engines, self._work)
        self._speech = SpeechLoader(settings, engines, self._work)
        self._transcription = TranscriptionLoader(settings, engines, self._work)

    def serve_models(self, models: tuple[ModelSpec, ...]) -> None:
        """Other models are served now. Later loads share the cores with them."""
        self._settings = replace(self._settings, models=models)
        self._generation.serve_models(models)
        self._encoders.serve_models(models)
        self._speech.serve_models(models)
        self._transcription.serve_models(models)

    async def open(self, name: str, spec: ModelSpec, loading: LoadContext) -> ReadyModel:
        """Loads a model and returns it, ready to serve. Raises `ModelError` if it cannot be loaded."""
        source = await self._find(name, spec, loading)
        await self._work(functools.partial(check_model, source.kind, source.path))
        kind = await self._work(functools.partial(source_kind, source, spec.kind))
        if kind == "generation":
            draft = await self._find_draft(name, spec, loading)
            return await self._generation.open(name, spec, source, loading, draft=draft)
        if kind == "speech":
            return await self._speech.open(name, spec, source, loading)
        if kind == "transcription":
            return await self._transcription.open(name, spec, source, loading)
        return await self._encoders.open(name, spec, source, kind, loading)

    async def _find_draft(self, name: str, spec: ModelSpec, loading: LoadContext) -> ModelSource | None:
        """The draft model, downloaded if it must be. Raises `ModelError` that names it if it cannot be used."""
        if (named := draft_of(self._settings, spec)) is None:
            return None
        try:
            source = await self._find(name, ModelSpec(named), loading)
            await self._work(functools.partial(check_model, source.kind, source.path))
            kind = await self._work(functools.partial(source_kind, source))
        except ModelError as error:
            raise ModelError(f"the draft model {named}: {error.message}") from error
        if kind != "generation":
            raise ModelError(f"the draft model {named} is for {kind}: it cannot draft text")
        return source

    async def _find(self, name: str, spec: ModelSpec, loading: LoadContext) -> ModelSource:
        search = FileSearch(loading, functools.partial(log.info, "%s: %s", name))
        try:
            return await self._searches(functools.partial(search.find, spec.source, self._settings.cache_dir))
        finally:
            search.cancel()

    async def describe(self, spec: ModelSpec) -> ModelDescription:
        """Describes a model without loading it, as far as its files are on this machine."""
        return await self._work(functools.partial(self._describe, spec))

    def _describe(self, spec: ModelSpec) -> ModelDescription:
        try:
            source = find_local(spec.source, cache_dir=self._settings.cache_dir)
            if source is None:
                return UNDESCRIBED
            kind = source_kind(source, spec.kind)
            if kind == "speech":
                return describe_speech(source)
            if kind == "transcription":
                return describe_transcriber(source)
            return self._generation.describe(spec, source) if kind == "generation" else describe_encoder(source, kind)
        except BAD_FILES as error:  # the load will say it too
            log.debug("%s cannot be described: %s", spec.source, error)
            return UNDESCRIBED

    async def close(self) -> None:
        """Ends downloads and the processes of chat templates. Call it after all engines have stopped."""
        await asyncio.gather(self._work.close(), self._searches.close(), self._generation.close())


def source_kind(source: ModelSource, wanted: str | None = None) -> Kind:
    """What a model is used for: as its files say, unless another kind was set. GGUF files are language models. Raises
    `ModelError` if it cannot be of the kind that was set."""
    if source.kind == "gguf":
        return choose_kind(source.path, {"model_type": "gguf"}, "generation", wanted)
    config = read_object(source.path / "config.json")
    return choose_kind(source.path, config, _kind_in_files(source.path, config), wanted)


def _kind_in_files(path: Path, config: dict[str, Any]) -> Kind:
    if transcription_family(config) is not None:
        return "transcription"
    if speech_family(config) is not None:
        return "speech"
    return kind_of(path, config)
