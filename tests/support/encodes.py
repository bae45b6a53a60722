"""Requests for encoder engines, and their vectors: of a model, or such that say whose they are."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.engine.jobs.messages import Encode, Vectors
from millstream.engine.jobs.plan import BatchPlan, BatchResult
from millstream.engine.jobs.scheduler import JobScheduler
from millstream.loading.backends import encoder_backend
from millstream.loading.settings import EngineSettings
from millstream.model_facts import EncoderFacts
from millstream.models.encoder_layout import read_layout
from millstream.models.source import ModelSource
from support.engines import Driver, engine


def tokens_of(length: int, token: int = 1) -> bytes:
    return np.full(length, token, np.int32).tobytes()


def encode(request_id: int, lengths: Sequence[int], *, token: int = 1, first_parts: Sequence[int] = ()) -> Encode:
    """A request for inputs of these lengths."""
    return Encode(request_id, tuple(tokens_of(length, token) for length in lengths), tuple(first_parts))


def facts(batch_tokens: int = 64, free_tokens: int = 0) -> EncoderFacts:
    return EncoderFacts(
        context_length=512,
        vocab_size=1000,
        width=2,
        weight_bytes=64,
        dtype="float32",
        device="cpu (none)",
        batch_tokens=batch_tokens,
        free_tokens=free_tokens,
    )


def computed(plan: BatchPlan) -> BatchResult:
    """Vectors that say whose they are: the request's number and the input's."""
    rows = [(each.request_id, each.index) for each in plan.inputs]
    return BatchResult(np.array(rows, np.float32).tobytes(), 2)


def requested(request_id: int, inputs: Iterable[Sequence[int]], first_parts: Sequence[int] = ()) -> Encode:
    """A request for these tokens."""
    return Encode(request_id, tuple(np.array(each, np.int32).tobytes() for each in inputs), tuple(first_parts))


def vectors_of(driver: Driver, request_id: int) -> NDArray[np.float32]:
    """The vectors that an engine gave for a request, in the order of its inputs."""
    rows: dict[int, NDArray[np.float32]] = {}
    for event in driver.outputs[request_id]:
        assert isinstance(event, Vectors)
        vectors = np.frombuffer(event.values, np.float32).reshape(-1, event.width)
        rows |= dict(zip(event.inputs, vectors, strict=True))
    return np.stack([rows[index] for index in range(len(rows))])


@contextmanager
def encoder_engine(
    folder: Path, *, pad_token: int = 0, answers: tuple[int, int] | None = None, calibrate: bool = False
) -> Iterator[Driver]:
    """The engine of the embedding model or reranker in a folder."""
    disabled = frozenset() if calibrate else frozenset({"calibration"})
    settings = EngineSettings(max_batch=4, disabled=disabled)
    source = ModelSource(folder.name, "folder", folder)
    backend = functools.partial(encoder_backend, source, settings, read_layout(folder), (pad_token, answers))
    with engine(backend, make_scheduler=JobScheduler) as driver:
        yield driver


def encode_alone_and_together(
    driver: Driver, inputs: Sequence[Sequence[int]], first_parts: Sequence[int] = ()
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The vectors of inputs in requests of their own, one after the other, and in one request."""
    driver.reset()
    for number, each in enumerate(inputs):
        driver.complete(requested(number, [each], first_parts[number : number + 1]))
    alone = np.concatenate([vectors_of(driver, number) for number in range(len(inputs))])
    driver.complete(requested(len(inputs), inputs, first_parts))
    return alone, vectors_of(driver, len(inputs))
