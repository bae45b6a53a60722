"""The MLX backend of speech models: speaks batches of pieces step by step, all on the owner thread."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from millstream.backend.device import current_device, limit_reuse
from millstream.backend.kernels.fusing import loads_unfused, steps_unfused
from millstream.backend.speech.loading import load_speaker
from millstream.backend.speech.settings import SpeechSettings
from millstream.backend.speech.speaker import Speaker
from millstream.engine.background import BackgroundTask
from millstream.engine.ownership import OwnerGuard, at_thread_end
from millstream.engine.protocols import Progress, ignore_progress
from millstream.engine.speech.messages import Speak
from millstream.engine.speech.plan import SpeechPlan, SpeechResult
from millstream.errors import ModelError
from millstream.model_facts import SpeechFacts
from millstream.speech_types import Samples

__all__ = ["MlxSpeechBackend", "SpeechSettings"]


class MlxSpeechBackend:
    """Holds the iterators of the batches that have begun. Nothing runs ahead of a step."""

    def __init__(self, settings: SpeechSettings) -> None:
        self._guard = OwnerGuard()
        self._settings = settings
        self._stream = mx.default_stream(mx.default_device())
        at_thread_end(mx.clear_streams)  # a thread that ends with streams can abort the process when that exits
        self._device = current_device()
        limit_reuse(self._device, settings.cache_limit)
        self._speaker: Speaker | None = None
        self._weight_bytes = 0
        self._open: dict[int, _Batch] = {}

    @loads_unfused
    def load(self, report: Progress = ignore_progress) -> SpeechFacts:
        """Owner only. Load and evaluate the weights."""
        self._guard.check("load")
        settings = self._settings
        speaker = self._speaker = load_speaker(settings, self._device, report)
        self._weight_bytes = sum(array.nbytes for array in speaker.weights)
        gc.freeze()  # else the garbage collector would scan all of it between two steps
        blas = f", {settings.blas}" if settings.blas and self._device.is_cpu else ""
        return SpeechFacts(
            sample_rate=speaker.sample_rate,
            weight_bytes=self._weight_bytes,
            dtype=speaker.dtype,
            device=f"{self._device.kind} ({self._device.name}){blas}",
            vocab_size=speaker.traits.vocab_size,
            voices=tuple(speaker.voices),
            batch_pieces=speaker.batch_pieces,
            open_batches=speaker.open_batches,
            capacity=settings.capacity,
            takes_speed=speaker.traits.takes_speed,
            takes_instructions=speaker.traits.takes_instructions,
            needs_instructions=speaker.traits.needs_instructions,
            notes=speaker.traits.notes,
        )

    def background_task(self, request: Speak | None) -> BackgroundTask | None:
        return None

    def memory_bytes(self) -> int:
        """Owner only."""
        return self._weight_bytes

    @steps_unfused
    def step(self, plan: SpeechPlan) -> SpeechResult:
        """Owner only. Begin a batch, or go on with one until it has samples or ends."""
        self._guard.check("step")
        if self._speaker is None:
            raise ModelError("The model is not loaded.")
        for number in plan.dropped:
            if (dropped := self._open.pop(number, None)) is not None:
                dropped.close()
        if plan.begin:
            self._open[plan.batch] = _Batch(self._speaker.speak(plan.begin), len(plan.begin))
        batch = self._open.get(plan.batch)
        if batch is None:
            return SpeechResult((), True)
        samples, done = batch.next()
        if done:
            del self._open[plan.batch]
        return SpeechResult(tuple(_bytes(each) for each in samples), done)

    def reset(self) -> None:
        """Owner only."""
        self._guard.check("reset")
        for batch in self._open.values():
            batch.close()
        self._open.clear()

    def close(self) -> None:
        """Owner only, and its last call: arrays must be freed on the thread whose stream they were made on."""
        self.reset()
        self._speaker = None
        self._weight_bytes = 0
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        try:
            mx.synchronize(self._stream)
        finally:
            mx.clear_cache()  # not the streams: the next engine on this thread needs them


class _Batch:
    """A batch that has begun. Its end is a step of its own: samples leave the engine before the next are computed."""

    def __init__(self, spoken: Iterator[Sequence[Samples]], pieces: int) -> None:
        self._spoken = spoken
        self._pieces = pieces

    def next(self) -> tuple[Sequence[Samples], bool]:
        item = next(self._spoken, None)
        if item is None:
            return [np.empty(0, np.float32)] * self._pieces, True
        return item, False

    def close(self) -> None:
        if close := getattr(self._spoken, "close", None):
            close()


def _bytes(samples: Samples) -> bytes:
    """Within -1 and 1, and no number that is none: it would be a bang in somebody's ear."""
    clean = np.nan_to_num(np.asarray(samples, np.float32).reshape(-1), nan=0.0, posinf=1.0, neginf=-1.0)
    return np.clip(clean, -1, 1).tobytes()
