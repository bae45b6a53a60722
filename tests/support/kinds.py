"""What the conformance suite needs to know of a kind of engine: how to start one, what to ask of it, what it gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.jobs.messages import Encode, Vectors
from millstream.engine.jobs.scheduler import JobScheduler
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Command, Submit
from millstream.engine.process_link import ProcessLink
from millstream.engine.protocols import BackendFactory, SchedulerFactory
from millstream.engine.speech.messages import Speak, Spoken
from millstream.engine.speech.scheduler import SpeechScheduler
from millstream.engine.transcription.messages import Transcribe, WindowText
from millstream.engine.transcription.scheduler import TranscriptionScheduler
from millstream.loading.backends import encoder_backend, generation_backend, speech_backend
from millstream.loading.settings import EngineSettings
from millstream.model_facts import EncoderFacts, TranscriptionFacts
from millstream.models.encoder_layout import read_layout
from millstream.models.source import ModelSource
from millstream.models.speech_layout import read_speech_layout
from support.digest_kind import CAPACITY, Digest, DigestBackend, DigestScheduler, Round
from support.encodes import requested
from support.engines import Driver, scheduler
from support.fake import FakeBackend
from support.speeches import spoken_request
from support.tiny_whisper import spoken
from support.transcriptions import backend_of, request, tokens_of

LINKS: dict[str, type[ThreadLink | ProcessLink]] = {"thread": ThreadLink, "process": ProcessLink}


class ForeignCommand(Command):
    """Of a kind that no engine is."""


class ForeignWork(Submit):
    """As `ForeignCommand`."""


@dataclass(frozen=True)
class Kind:
    backend: BackendFactory
    scheduler: SchedulerFactory
    work: Callable[..., Submit]
    """`work(request_id, seed, steps)`: a request whose result depends on `seed` and that takes about `steps` steps."""
    output: Callable[[Any], tuple[object, ...]]
    """The parts of a result that an `Output` carries."""

    def result(self, driver: Driver, request_id: int) -> list[object]:
        return [part for event in driver.outputs.get(request_id, []) for part in self.output(event)]


def _generate(request_id: int, seed: int = 1, steps: int = 5) -> Generate:
    return Generate(request_id, (seed, 2, 3), steps)


def _tokens(event: Tokens) -> tuple[object, ...]:
    return event.tokens


def _digest(request_id: int, seed: int = 1, steps: int = 5) -> Digest:
    return Digest(request_id, bytes([seed]), steps)


def _round(event: Round) -> tuple[object, ...]:
    return (event.digest,)


def _encode(request_id: int, seed: int = 1, steps: int = 5) -> Encode:
    return requested(request_id, [[seed + 1, 2, 3]] * steps)


def _vectors(event: Vectors) -> tuple[object, ...]:
    size = 4 * event.width
    return tuple((index, event.values[n * size : (n + 1) * size]) for n, index in enumerate(event.inputs))


def one_by_one(facts: EncoderFacts) -> JobScheduler:
    """Batches of one input, so that a request of some inputs takes as many steps."""
    return JobScheduler(replace(facts, batch_tokens=1))


def _encoder(folder: Path) -> Kind:
    settings = EngineSettings(max_batch=CAPACITY, disabled=frozenset({"calibration"}))
    source = ModelSource("tiny", "folder", folder)
    backend = functools.partial(encoder_backend, source, settings, read_layout(folder), (0, None))
    return Kind(backend, one_by_one, _encode, _vectors)


def _transcribe(request_id: int, seed: int = 1, steps: int = 5) -> Transcribe:
    return request(request_id, [spoken(0.5, seed)] * steps)


def _texts(event: WindowText) -> tuple[object, ...]:
    return ((event.index, event.language, tokens_of(event)),)


def one_row(facts: TranscriptionFacts) -> TranscriptionScheduler:
    """One window at a time, so that they end in their order."""
    return TranscriptionScheduler(replace(facts, max_rows=1))


def _speak(request_id: int, seed: int = 1, steps: int = 5) -> Speak:
    return spoken_request(request_id, [[seed + 1, 2, 3]] * steps)


def _spoken(event: Spoken) -> tuple[object, ...]:
    return ((event.piece, event.samples),) if event.samples else ()


def _speech(folder: Path) -> Kind:
    source = ModelSource("tiny", "folder", folder)
    settings = EngineSettings(max_batch=CAPACITY)
    backend = functools.partial(speech_backend, source, settings, read_speech_layout(folder))
    return Kind(backend, SpeechScheduler, _speak, _spoken)


def kind_of(name: str, tiny_model: Callable[[str], Path]) -> Kind:
    """`fake` and `mlx` generate, `encoder` embeds, `transcription` writes down speech, `speech` speaks; `digest` is a
    kind of the tests' own. All take `CAPACITY` requests at the same time."""
    if name == "digest":
        return Kind(DigestBackend, DigestScheduler, _digest, _round)
    if name == "transcription":
        return Kind(backend_of(tiny_model("whisper"), capacity=CAPACITY), one_row, _transcribe, _texts)
    if name == "encoder":
        return _encoder(tiny_model("bert"))
    if name == "speech":
        return _speech(tiny_model("kokoro"))
    backend: BackendFactory = functools.partial(FakeBackend, max_rows=CAPACITY)
    if name == "mlx":
        source = ModelSource("tiny", "folder", tiny_model("llama"))
        backend = functools.partial(generation_backend, source, EngineSettings(max_batch=CAPACITY))
    return Kind(backend, functools.partial(scheduler, 7), _generate, _tokens)
