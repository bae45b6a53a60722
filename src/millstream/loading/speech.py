"""Loads speech models: layout, text preparation and engine."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

from millstream.config import ModelSpec, Settings
from millstream.engine.speech.scheduler import SpeechScheduler
from millstream.installed import require_mlx_audio
from millstream.loading.backends import speech_backend
from millstream.loading.engines import Engines
from millstream.loading.espeak import find_espeak
from millstream.loading.settings import engine_settings, max_batch
from millstream.loading.work import Work
from millstream.model_facts import UNDESCRIBED, ModelDescription, SpeechFacts
from millstream.models.description import BAD_FILES, describe_files
from millstream.models.estimate import DeviceKind, expected_device
from millstream.models.files import read_object
from millstream.models.kokoro_config import read_kokoro_config
from millstream.models.safetensors_header import FLOATS
from millstream.models.source import ModelSource
from millstream.models.speech_layout import (
    LIBRARY_FAMILIES,
    SpeechLayout,
    read_speech_layout,
    speaker_names,
    speech_family,
    speech_tensors,
)
from millstream.service.admission import Admission
from millstream.service.managed_model import LoadContext
from millstream.service.memory_budget import gib
from millstream.service.speech.model import SpeechModel
from millstream.text.speech.kokoro import KokoroWriter
from millstream.text.speech.plain import PlainWriter
from millstream.text.speech.script import ScriptWriter

log = logging.getLogger(__name__)

WORKSPACE = 768 * 2**20
"""Bytes that the longest piece takes beside the weights."""


@dataclass(frozen=True, slots=True)
class _Files:
    """What was read of a model's folder."""

    layout: SpeechLayout
    writer: ScriptWriter
    description: ModelDescription


class SpeechLoader:
    def __init__(self, settings: Settings, engines: Engines, work: Work) -> None:
        self._settings = settings
        self._engines = engines
        self._work = work

    def serve_models(self, models: tuple[ModelSpec, ...]) -> None:
        """Other models are served now. Later loads share the cores with them."""
        self._settings = replace(self._settings, models=models)

    async def open(self, name: str, spec: ModelSpec, source: ModelSource, loading: LoadContext) -> SpeechModel:
        """Raises `ModelError` if it cannot be loaded."""
        files = await self._work(functools.partial(_read, source))
        await self._reserve(name, source, loading)
        engine, facts = await self._engines.start(
            name,
            functools.partial(speech_backend, source, engine_settings(self._settings, spec), files.layout),
            SpeechScheduler,
            Admission(
                capacity=max_batch(self._settings, spec),
                queue=self._settings.queue,
                fail_fast=self._settings.fail_fast,
                unit="requests",
            ),
            loading,
            isolated=self._settings.isolated(spec),
        )
        assert isinstance(facts, SpeechFacts)
        for note in facts.notes:
            log.info("%s: %s", name, note)
        return SpeechModel(
            name=name, engine=engine, facts=facts, spec=spec, writer=files.writer, files=files.description
        )

    async def _reserve(self, name: str, source: ModelSource, loading: LoadContext) -> None:
        if self._settings.memory is None:
            return
        device = expected_device(self._settings.device)
        weights = await self._work(functools.partial(estimate_speech, source, device))
        need = weights + WORKSPACE
        reserved = await loading.reserve(need, need)
        log.info("%s: about %s of weights; reserved %s", name, gib(weights), gib(reserved))


def estimate_speech(source: ModelSource, device: DeviceKind) -> int:
    """Bytes of the weights once loaded: on the CPU they are float32."""
    tensors = speech_tensors(source.path).values()
    if device != "cpu":
        return sum(tensor.nbytes for tensor in tensors)
    return sum(4 * tensor.values if tensor.dtype in FLOATS else tensor.nbytes for tensor in tensors)


def describe_speech(source: ModelSource) -> ModelDescription:
    """What a model's files say about it, as far as they can be read."""
    described = replace(UNDESCRIBED, capabilities=("speech",))
    try:
        described = replace(described, family=speech_family(read_object(source.path / "config.json")))
        files = describe_files(source)
    except BAD_FILES as error:
        log.info("%s cannot be described: %s", source.path, error)
        return described
    return replace(
        described,
        format=files.format,
        parameters=files.parameters,
        quantization=files.quantization,
        file_bytes=files.file_bytes,
    )


def _read(source: ModelSource) -> _Files:
    layout = read_speech_layout(source.path)
    return _Files(layout, _writer(source, layout), describe_speech(source))


def _writer(source: ModelSource, layout: SpeechLayout) -> ScriptWriter:
    if layout.family in LIBRARY_FAMILIES:
        require_mlx_audio(f"{source.path}: {layout.family} models")
        return PlainWriter(speaker_names(source.path, layout))
    config = read_kokoro_config(source.path)
    return KokoroWriter(config.vocab, [name for name, _ in layout.voices], config.max_phonemes, espeak=find_espeak())
