"""The MLX backend of transcription models: runs a family's rows or windows, all on the owner thread."""

from __future__ import annotations

import gc

import mlx.core as mx

from millstream.backend.device import current_device, limit_reuse
from millstream.backend.kernels.fusing import loads_unfused, steps_unfused
from millstream.backend.transcription.family import SteppingFamily
from millstream.backend.transcription.loading import load_family
from millstream.backend.transcription.settings import TranscriptionSettings
from millstream.engine.background import BackgroundTask
from millstream.engine.ownership import OwnerGuard, at_thread_end
from millstream.engine.protocols import Progress, ignore_progress
from millstream.engine.token_ids import check_token_ids
from millstream.engine.transcription.messages import Transcribe
from millstream.engine.transcription.plan import TranscriptionPlan, TranscriptionResult
from millstream.errors import ModelError
from millstream.model_facts import TranscriptionFacts

__all__ = ["MlxTranscriptionBackend", "TranscriptionSettings"]


class MlxTranscriptionBackend:
    """Everything that a library caches across threads, such as windows and mel filters, is made by the family on this
    thread and belongs to it: an array that another engine's thread made lazily cannot be evaluated here."""

    def __init__(self, settings: TranscriptionSettings) -> None:
        self._guard = OwnerGuard()
        self._settings = settings
        self._stream = mx.default_stream(mx.default_device())
        at_thread_end(mx.clear_streams)  # a thread that ends with streams can abort the process when that exits
        self._device = current_device()
        limit_reuse(self._device, settings.cache_limit)
        self._family: SteppingFamily | None = None
        self._vocab_size = 0

    @loads_unfused
    def load(self, report: Progress = ignore_progress) -> TranscriptionFacts:
        """Owner only. Load and evaluate the weights."""
        self._guard.check("load")
        settings = self._settings
        family = self._family = load_family(settings, self._device, report)
        gc.freeze()  # else the garbage collector would scan all of it between two steps
        traits = family.traits
        self._vocab_size = traits.vocab_size
        rows = min(traits.max_rows, settings.max_rows or traits.max_rows)
        blas = f", {settings.blas}" if settings.blas and self._device.is_cpu else ""
        return TranscriptionFacts(
            window_seconds=traits.window_seconds,
            max_rows=rows,
            start_windows=min(rows, traits.start_windows),
            weight_bytes=family.weight_bytes,
            dtype=family.dtype,
            device=f"{self._device.kind} ({self._device.name}){blas}",
            languages=traits.languages,
            detects_language=traits.detects_language,
            translates=traits.translates,
            word_times=traits.word_times,
            takes_prompt=traits.takes_prompt,
            capacity=settings.capacity,
            notes=traits.notes,
        )

    def background_task(self, request: Transcribe | None) -> BackgroundTask | None:
        """Refuses a prompt with tokens that the model has no embeddings for."""
        vocabulary, rows = self._settings.vocabulary, self._vocab_size
        prompt = "" if request is None else request.options.prompt
        if vocabulary is None or not rows or not prompt:
            return None

        def check() -> None:
            tokens = vocabulary.encode(prompt)
            check_token_ids(tokens, rows, where="the prompt", name=lambda token: vocabulary.decode([token]) or None)

        return BackgroundTask(check, len(prompt))

    def memory_bytes(self) -> int:
        """Owner only."""
        return 0 if self._family is None else self._family.weight_bytes + self._family.cache_bytes()

    @steps_unfused
    def step(self, plan: TranscriptionPlan) -> TranscriptionResult:
        """Owner only. Begin windows and advance all rows."""
        self._guard.check("step")
        family = self._family
        if family is None:
            raise ModelError("The model is not loaded.")
        family.drop(plan.drop)
        if plan.start:
            family.start(plan.start)
        return family.advance()

    def reset(self) -> None:
        """Owner only."""
        self._guard.check("reset")
        if self._family is not None:
            self._family.reset()

    def close(self) -> None:
        """Owner only, and its last call: arrays must be freed on the thread whose stream they were made on."""
        self._guard.check("close")
        self._family = None
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        try:
            mx.synchronize(self._stream)
        finally:
            mx.clear_cache()  # not the streams: the next engine on this thread needs them
