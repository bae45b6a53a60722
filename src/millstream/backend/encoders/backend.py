"""The MLX backend of embedding models and rerankers: runs padded batches, all on the owner thread."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np

from millstream.backend.device import current_device
from millstream.backend.encoders.calibration import DEFAULT, choose_sizes
from millstream.backend.encoders.loading import Encoder, load_encoder
from millstream.backend.encoders.settings import EncoderSettings
from millstream.engine.background import BackgroundTask
from millstream.engine.jobs.messages import Encode
from millstream.engine.jobs.plan import BatchInput, BatchPlan, BatchResult
from millstream.engine.ownership import OwnerGuard, at_thread_end
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import ModelError
from millstream.model_facts import EncoderFacts

__all__ = ["EncoderSettings", "MlxEncoderBackend"]

MAX_CONTEXT = 32_768
"""Most tokens of an input where the files set no limit: attention takes memory by its square on some devices."""


class MlxEncoderBackend:
    """Computes each plan before it returns: batches are large, so that there is nothing to gain from running ahead."""

    def __init__(self, settings: EncoderSettings) -> None:
        self._guard = OwnerGuard()
        self._settings = settings
        self._stream = mx.default_stream(mx.default_device())
        at_thread_end(mx.clear_streams)  # a thread that ends with streams can abort the process when that exits
        if settings.cache_limit is not None:
            mx.set_cache_limit(settings.cache_limit)
        self._device = current_device()
        self._encoder: Encoder | None = None

    def load(self, report: Progress = ignore_progress) -> EncoderFacts:
        """Owner only. Load and evaluate the weights, and measure what a step costs."""
        self._guard.check("load")
        settings = self._settings
        layout = settings.layout
        encoder = self._encoder = load_encoder(
            settings.path, layout, self._device, unpack=settings.unpack, answers=settings.answers, report=report
        )
        longest = min(layout.max_tokens or MAX_CONTEXT, MAX_CONTEXT)
        width = self._compute([BatchInput(0, 0, _tokens(min(8, longest)))], min(8, longest)).shape[1]
        tokens, free = DEFAULT
        if "calibration" not in settings.disabled:
            tokens, free = choose_sizes(self._run, longest)
        gc.freeze()  # else the garbage collector would scan all of it between two steps
        blas = f", {settings.blas}" if settings.blas and self._device.is_cpu else ""
        return EncoderFacts(
            context_length=longest,
            width=width,
            weight_bytes=encoder.weight_bytes,
            dtype=encoder.dtype,
            device=f"{self._device.kind} ({self._device.name}){blas}",
            batch_tokens=tokens,
            free_tokens=free,
            capacity=settings.capacity,
            notes=layout.notes,
        )

    def background_task(self, request: Encode | None) -> BackgroundTask | None:
        return None

    def memory_bytes(self) -> int:
        """Owner only."""
        return 0 if self._encoder is None else self._encoder.weight_bytes

    def step(self, plan: BatchPlan) -> BatchResult:
        """Owner only. Compute one batch."""
        self._guard.check("step")
        vectors = self._compute(plan.inputs, plan.length)
        return BatchResult(np.asarray(vectors).tobytes(), vectors.shape[1])

    def reset(self) -> None:
        """Owner only. Nothing is kept between steps."""
        self._guard.check("reset")

    def close(self) -> None:
        """Owner only, and its last call: arrays must be freed on the thread whose stream they were made on."""
        self._guard.check("close")
        self._encoder = None
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        try:
            mx.synchronize(self._stream)
        finally:
            mx.clear_cache()  # not the streams: the next engine on this thread needs them

    def _compute(self, inputs: tuple[BatchInput, ...] | list[BatchInput], length: int) -> mx.array:
        if self._encoder is None:
            raise ModelError("The model is not loaded.")
        ids = np.full((len(inputs), length), self._settings.pad_token, np.int32)
        lengths = np.empty(len(inputs), np.int32)
        for row, each in enumerate(inputs):
            tokens = np.frombuffer(each.tokens, np.int32)
            ids[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
        places = np.arange(length)
        keep = None if lengths.min() == length else mx.array(places[None, :] < lengths[:, None])
        types = None
        if any(each.first_part is not None for each in inputs):
            firsts = np.array([length if each.first_part is None else each.first_part for each in inputs])
            types = mx.array(
                ((places[None, :] >= firsts[:, None]) & (places[None, :] < lengths[:, None])).astype(np.int32)
            )
        hidden = self._encoder.body(mx.array(ids), keep, types)
        vectors = self._encoder.head(hidden, mx.array(lengths)).astype(mx.float32)
        mx.eval(vectors)
        return vectors

    def _run(self, rows: int, length: int) -> None:
        self._compute([BatchInput(0, row, _tokens(length)) for row in range(rows)], length)


def _tokens(length: int) -> bytes:
    return np.ones(length, np.int32).tobytes()
