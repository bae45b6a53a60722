"""Loads transcription models: their files' descriptions, memory and engine."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace

from millstream.config import ModelSpec, Settings
from millstream.engine.transcription.scheduler import TranscriptionScheduler
from millstream.loading.backends import transcription_backend
from millstream.loading.engines import Engines
from millstream.loading.settings import max_batch, yielding
from millstream.loading.work import Work
from millstream.model_facts import UNDESCRIBED, ModelDescription, TranscriptionFacts
from millstream.models.description import BAD_FILES
from millstream.models.estimate import expected_device
from millstream.models.source import ModelSource
from millstream.models.transcription_memory import TranscriptionMemory, describe_transcription, estimate_transcription
from millstream.service.admission import Admission
from millstream.service.managed_model import LoadContext
from millstream.service.memory_budget import gib
from millstream.service.transcription.model import TranscriptionModel, capabilities

log = logging.getLogger(__name__)


class TranscriptionLoader:
    def __init__(self, settings: Settings, engines: Engines, work: Work) -> None:
        self._settings = settings
        self._engines = engines
        self._work = work

    def serve_models(self, models: tuple[ModelSpec, ...]) -> None:
        """Other models are served now. Later loads share the cores with them."""
        self._settings = replace(self._settings, models=models)

    async def open(self, name: str, spec: ModelSpec, source: ModelSource, loading: LoadContext) -> TranscriptionModel:
        """Raises `ModelError` if it cannot be loaded."""
        files = await self._work(functools.partial(describe_transcriber, source))
        rows = await self._reserve(name, spec, source, loading)
        engine, facts = await self._engines.start(
            name,
            functools.partial(transcription_backend, source, yielding(self._settings, spec), rows),
            TranscriptionScheduler,
            Admission(
                capacity=max_batch(self._settings, spec),
                queue=self._settings.queue,
                fail_fast=self._settings.fail_fast,
                unit="requests",
            ),
            loading,
            isolated=self._settings.isolated(spec),
        )
        assert isinstance(facts, TranscriptionFacts)
        for note in facts.notes:
            log.info("%s: %s", name, note)
        return TranscriptionModel(name, engine, facts, spec, files)

    async def _reserve(self, name: str, spec: ModelSpec, source: ModelSource, loading: LoadContext) -> int | None:
        """Returns how many windows may run at the same time in the memory that was granted; None for no bound."""
        if self._settings.memory is None:
            return None
        device = expected_device(self._settings.device)
        need: TranscriptionMemory = await self._work(functools.partial(estimate_transcription, source, device))
        wanted = need.for_rows(min(max_batch(self._settings, spec), need.rows))
        reserved = await loading.reserve(need.for_rows(1), wanted)
        log.info("%s: about %s of weights; reserved %s", name, gib(need.weights), gib(reserved))
        return need.rows_in(reserved)


def describe_transcriber(source: ModelSource) -> ModelDescription:
    """What a model's files say about it, as far as they can be read."""
    try:
        found = describe_transcription(source)
    except BAD_FILES as error:
        log.info("%s cannot be described: %s", source.path, error)
        return replace(UNDESCRIBED, capabilities=("transcription",))
    return replace(
        found.description, capabilities=capabilities(translates=found.translates, word_times=found.word_times)
    )
