"""Transcription engines driven by tests: requests, and what came of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from millstream.engine.link import ThreadLink
from millstream.engine.process_link import ProcessLink
from millstream.engine.protocols import BackendFactory
from millstream.engine.transcription.messages import Options, Transcribe, Window, WindowText
from millstream.engine.transcription.scheduler import TranscriptionScheduler
from millstream.loading.backends import transcription_backend
from millstream.loading.settings import EngineSettings
from millstream.model_facts import TranscriptionFacts
from millstream.models.source import ModelSource
from millstream.speech_types import Samples
from support.engines import Driver, engine

GREEDY = Options(temperatures=(0.0,))


def request(request_id: int, windows: Sequence[Samples], options: Options = GREEDY) -> Transcribe:
    return Transcribe(request_id, options, tuple(window(index, each) for index, each in enumerate(windows)))


def window(index: int, samples: Samples) -> Window:
    return Window(index, np.ascontiguousarray(samples, np.float32).tobytes())


def facts(*, rows: int = 4, start: int = 2, detects_language: bool = False) -> TranscriptionFacts:
    return TranscriptionFacts(
        window_seconds=30.0,
        max_rows=rows,
        start_windows=start,
        weight_bytes=1,
        dtype="float32",
        device="cpu (none)",
        detects_language=detects_language,
    )


def backend_of(
    folder: Path, *, capacity: int = 4, rows: int | None = None, disabled: Sequence[str] = ("calibration",)
) -> BackendFactory:
    settings = EngineSettings(max_batch=capacity, disabled=frozenset(disabled))
    return functools.partial(transcription_backend, ModelSource(folder.name, "folder", folder), settings, rows)


def starting(windows: int, facts: TranscriptionFacts) -> TranscriptionScheduler:
    """A scheduler that begins so many windows in one step."""
    return TranscriptionScheduler(replace(facts, start_windows=windows))


@contextmanager
def transcription_engine(
    folder: Path,
    *,
    rows: int | None = None,
    start: int = 1,
    link: type[ThreadLink | ProcessLink] = ThreadLink,
    disabled: Sequence[str] = ("calibration",),
) -> Iterator[Driver]:
    backend = backend_of(folder, rows=rows, disabled=disabled)
    with engine(backend, kind=link, make_scheduler=functools.partial(starting, start)) as driver:
        yield driver


def texts_of(driver: Driver, request_id: int) -> list[WindowText]:
    """In the order of the windows."""
    found = [event for event in driver.outputs.get(request_id, []) if isinstance(event, WindowText)]
    return sorted(found, key=lambda text: text.index)


def tokens_of(text: WindowText) -> tuple[tuple[int, ...], ...]:
    return tuple(segment.tokens for segment in text.segments)
