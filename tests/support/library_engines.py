"""Engines of speech models that run on mlx-audio's modules, straight from their folders."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from millstream.engine.speech.messages import Piece, Speak, Spoken
from millstream.engine.speech.scheduler import SpeechScheduler
from millstream.engine.transcription.messages import Options, Transcribe, Window, WindowText
from millstream.engine.transcription.scheduler import TranscriptionScheduler
from millstream.loading.backends import speech_backend
from millstream.loading.settings import EngineSettings
from millstream.models.source import ModelSource
from millstream.models.speech_layout import read_speech_layout
from millstream.text.tekken import read_tekken
from support.audio_files import Array
from support.engines import Driver, engine
from support.tiny_mlx_audio import Words


def _transcription_backend(folder: Path) -> Any:
    """Called on the owner thread."""
    from millstream.backend.transcription.backend import MlxTranscriptionBackend, TranscriptionSettings

    vocabulary: Any = None
    if (folder / "tekken.json").exists():
        vocabulary = read_tekken(folder)
    elif (folder / "tokenizer.json").exists():
        vocabulary = Words(folder)
    return MlxTranscriptionBackend(TranscriptionSettings(folder, vocabulary))


@contextmanager
def transcription_engine(folder: Path) -> Iterator[Driver]:
    with engine(functools.partial(_transcription_backend, folder), make_scheduler=TranscriptionScheduler) as driver:
        yield driver


def _speech_backend(folder: Path) -> Any:
    """Called on the owner thread."""
    return speech_backend(ModelSource(folder.name, "folder", folder), EngineSettings(), read_speech_layout(folder))


@contextmanager
def speech_engine(folder: Path) -> Iterator[Driver]:
    with engine(functools.partial(_speech_backend, folder), make_scheduler=SpeechScheduler) as driver:
        yield driver


def speak(request_id: int, *texts: str, voice: str | None = None, **options: Any) -> Speak:
    """A request for these pieces."""
    mix = ((voice, 1.0),) if voice else ()
    return Speak(request_id, tuple(Piece(text=text) for text in texts), mix, **options)


def sound_of(driver: Driver, request_id: int) -> list[Array]:
    """The samples of each piece."""
    found: dict[int, list[Array]] = {}
    for event in driver.outputs.get(request_id, []):
        assert isinstance(event, Spoken)
        found.setdefault(event.piece, []).append(np.frombuffer(event.samples, np.float32))
    return [np.concatenate(found[index]) for index in sorted(found)]


def transcribe(request_id: int, audio: Sequence[Array], **options: Any) -> Transcribe:
    """A request of these windows. The best token is taken, unless the options say another thing."""
    windows = tuple(Window(index, each.tobytes()) for index, each in enumerate(audio))
    return Transcribe(request_id, Options(**{"temperatures": (0.0,), **options}), windows)


def texts_of(driver: Driver, request_id: int) -> list[WindowText]:
    """In the order of the windows."""
    found = [event for event in driver.outputs.get(request_id, []) if isinstance(event, WindowText)]
    return sorted(found, key=lambda text: text.index)


def tokens_of(text: WindowText) -> list[int]:
    return [token for segment in text.segments for token in segment.tokens]
