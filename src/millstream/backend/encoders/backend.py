"""The MLX backend of embedding models and rerankers: runs padded batches, all on the owner thread."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from millstream.backend.encoders.calibration import DEFAULT, choose_sizes
from millstream.backend.encoders.loading import Encoder, load_encoder
from millstream.backend.encoders.padding import Padded
from millstream.backend.encoders.settings import EncoderSettings
from millstream.backend.kernels.fusing import loads_unfused, steps_unfused
from millstream.backend.layers.vector_math import set_vector_threads
from millstream.backend.mlx_backend import MlxBackend
from millstream.engine.background import BackgroundTask
from millstream.engine.jobs.messages import Encode
from millstream.engine.jobs.plan import BatchInput, BatchPlan, BatchResult
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import ModelError
from millstream.model_facts import EncoderFacts

__all__ = ["EncoderSettings", "MlxEncoderBackend"]

MAX_CONTEXT = 32_768
"""Most tokens of an input where the files set no limit: attention takes memory by its square on some devices."""


class MlxEncoderBackend(MlxBackend):
    """Computes each plan before it returns: batches are large, so that there is nothing to gain from running ahead."""

    def __init__(self, settings: EncoderSettings) -> None:
        super().__init__(cache_limit=settings.cache_limit, blas=settings.blas)
        self._settings = settings
        self._encoder: Encoder | None = None
        self._pad_token = 0
        self._vector_threads: int | None = None
        """MKL's setting for this thread before the load. The next engine on it gets it back."""

    @loads_unfused
    def load(self, report: Progress = ignore_progress) -> EncoderFacts:
        """Owner only. Load and evaluate the weights, and measure what a step costs."""
        self._guard.check("load")
        if self._device.is_cpu:
            self._vector_threads = set_vector_threads(1)
        settings = self._settings
        layout = settings.layout
        encoder = self._encoder = load_encoder(
            settings.path,
            layout,
            self._device,
            unpack=settings.unpack,
            answers=settings.answers,
            disabled=settings.disabled,
            report=report,
        )
        longest = min(layout.max_tokens or MAX_CONTEXT, encoder.body.max_tokens or MAX_CONTEXT, MAX_CONTEXT)
        # Padding is masked, but what is read for it must be numbers.
        self._pad_token = settings.pad_token if 0 <= settings.pad_token < encoder.body.vocab_size else 0
        width = self._compute([BatchInput(0, 0, _tokens(min(8, longest)))], min(8, longest)).shape[1]
        tokens, free = DEFAULT
        if "calibration" not in settings.disabled:
            tokens, free = choose_sizes(self._run, longest)
        gc.freeze()  # else the garbage collector would scan all of it between two steps
        return EncoderFacts(
            context_length=longest,
            vocab_size=encoder.body.vocab_size,
            width=width,
            weight_bytes=encoder.weight_bytes,
            dtype=encoder.dtype,
            device=self._describe_device(),
            batch_tokens=tokens,
            free_tokens=free,
            capacity=settings.capacity,
            notes=layout.notes,
        )

    def background_task(self, request: Encode | None) -> BackgroundTask | None:
        return None

    def memory_bytes(self) -> int:
        """Owner only."""
        if self._encoder is None:
            return 0
        prefixes = self._encoder.prefixes
        return self._encoder.weight_bytes + (0 if prefixes is None else prefixes.nbytes)

    @steps_unfused
    def step(self, plan: BatchPlan) -> BatchResult:
        """Owner only. Compute one batch."""
        self._guard.check("step")
        vectors = self._compute(plan.inputs, plan.length)
        return BatchResult(np.asarray(vectors).tobytes(), vectors.shape[1])

    def reset(self) -> None:
        """Owner only."""
        self._guard.check("reset")
        if self._encoder is not None and self._encoder.prefixes is not None:
            self._encoder.prefixes.clear()

    def _drop_arrays(self) -> None:
        self._encoder = None
        if self._vector_threads is not None:
            set_vector_threads(self._vector_threads)

    def _compute(self, inputs: Sequence[BatchInput], length: int) -> mx.array:
        if self._encoder is None:
            raise ModelError("The model is not loaded.")
        encoder = self._encoder
        rows = [np.frombuffer(each.tokens, np.int32) for each in inputs]
        shared = encoder.prefixes.common(rows) if encoder.prefixes is not None else 0
        batch = Padded.of([row[shared:] for row in rows], length - shared, self._pad_token)
        if shared and encoder.prefixes is not None:
            hidden = encoder.prefixes.continued(rows[0][:shared], batch.ids)
        else:
            hidden = encoder.body(batch.ids, batch.keep, batch.types([each.first_part for each in inputs]))
        vectors = encoder.head(hidden, batch.lengths).astype(mx.float32)
        mx.eval(vectors)
        return vectors

    def _run(self, rows: int, length: int) -> None:
        # Rows that differ: what all have in common would be computed once.
        self._compute([BatchInput(0, row, _tokens(length, row % 2)) for row in range(rows)], length)


def _tokens(length: int, token: int = 1) -> bytes:
    return np.full(length, token, np.int32).tobytes()
