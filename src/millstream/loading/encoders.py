"""Loads embedding models and rerankers: layout, tokenizer and engine."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

import tokenizers

from millstream.config import ModelSpec, Settings
from millstream.engine.jobs.scheduler import JobScheduler
from millstream.errors import ModelError
from millstream.loading.backends import encoder_backend
from millstream.loading.engines import Engines
from millstream.loading.settings import max_batch, yielding
from millstream.loading.work import Work
from millstream.model_facts import UNDESCRIBED, EncoderFacts, ModelDescription
from millstream.models.description import BAD_FILES, describe_files
from millstream.models.encoder_layout import EncoderLayout, Kind, read_layout
from millstream.models.estimate import estimate_weights, expected_device
from millstream.models.source import ModelSource
from millstream.service.admission import Admission
from millstream.service.encoding.model import EmbeddingModel, EncoderModel, RerankModel
from millstream.service.managed_model import LoadContext
from millstream.service.memory_budget import gib
from millstream.text.inputs import EncoderTokenizer
from millstream.text.loading import load_backend
from millstream.text.pairs import CrossEncoderPairs, PairEncoder, YesNoPairs, answer_tokens

log = logging.getLogger(__name__)

WORKSPACE = 256 * 2**20
"""Bytes that a batch takes beside the weights."""


@dataclass(frozen=True, slots=True)
class _Files:
    """What was read of a model's folder."""

    layout: EncoderLayout
    backend: tokenizers.Tokenizer
    description: ModelDescription


class EncoderLoader:
    """Loads models of two kinds, which differ in their heads and in how they read texts."""

    def __init__(self, settings: Settings, engines: Engines, work: Work) -> None:
        self._settings = settings
        self._engines = engines
        self._work = work

    def serve_models(self, models: tuple[ModelSpec, ...]) -> None:
        """Other models are served now. Later loads share the cores with them."""
        self._settings = replace(self._settings, models=models)

    async def open(
        self, name: str, spec: ModelSpec, source: ModelSource, kind: Kind, loading: LoadContext
    ) -> EncoderModel:
        """Raises `ModelError` if it cannot be loaded."""
        files = await self._work(functools.partial(_read, source, kind))
        await self._reserve(name, source, loading)
        engine, facts = await self._engines.start(
            name,
            functools.partial(encoder_backend, source, yielding(self._settings, spec), files.layout, _tokens(files)),
            JobScheduler,
            Admission(
                capacity=max_batch(self._settings, spec),
                queue=self._settings.queue,
                fail_fast=self._settings.fail_fast,
                unit="requests",
            ),
            loading,
            isolated=self._settings.isolated(spec),
        )
        assert isinstance(facts, EncoderFacts)
        for note in facts.notes:
            log.info("%s: %s", name, note)
        if kind == "rerank":
            pairs: PairEncoder = (YesNoPairs if files.layout.yes_no else CrossEncoderPairs)(files.backend)
            return RerankModel(name, engine, facts, spec, files.description, pairs=pairs)
        return EmbeddingModel(
            name,
            engine,
            facts,
            spec,
            files.description,
            tokenizer=EncoderTokenizer(files.backend),
            prompts=dict(files.layout.prompts),
            default_prompt=files.layout.default_prompt,
            dimensions=files.layout.dimensions or (),
        )

    async def _reserve(self, name: str, source: ModelSource, loading: LoadContext) -> None:
        if self._settings.memory is None:
            return
        device = expected_device(self._settings.device)
        weights = await self._work(functools.partial(estimate_weights, source, device))
        need = weights + WORKSPACE
        reserved = await loading.reserve(need, need)
        log.info("%s: about %s of weights; reserved %s", name, gib(weights), gib(reserved))


def describe_encoder(source: ModelSource, kind: Kind) -> ModelDescription:
    """What a model's files say about it, as far as they can be read."""
    try:
        files = describe_files(source)
    except BAD_FILES as error:
        log.info("%s cannot be described: %s", source.path, error)
        return replace(UNDESCRIBED, capabilities=(kind,))
    return ModelDescription(
        format=files.format,
        family=files.family,
        parameters=files.parameters,
        quantization=files.quantization,
        context_length=files.context_length,
        capabilities=(kind,),
        file_bytes=files.file_bytes,
    )


def _read(source: ModelSource, kind: Kind) -> _Files:
    layout = read_layout(source.path, kind)
    return _Files(layout, load_backend(source), describe_encoder(source, kind))


def _tokens(files: _Files) -> tuple[int, tuple[int, int] | None]:
    """The token for padding, and those for no and yes where the model answers with them."""
    answers = answer_tokens(files.backend) if files.layout.yes_no else None
    if files.layout.yes_no and answers is None:
        raise ModelError("its tokenizer has no tokens for yes and no, so it cannot be used as a reranker")
    padding = files.backend.padding
    return (padding or {}).get("pad_id", 0), answers
