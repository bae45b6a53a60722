"""The MLX backend for text models. Made, used and freed on the owner thread."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from millstream.backend.batch import Batch, Launched
from millstream.backend.caches import RowCaches, new_row, states, unbatchable
from millstream.backend.device import current_device
from millstream.backend.loading import load
from millstream.engine.backend import Plan, Prefill, StepResult
from millstream.engine.messages import Submit
from millstream.engine.ownership import OwnerGuard
from millstream.errors import ModelError
from millstream.types import ModelFacts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextModelSettings:
    kind: Literal["folder", "gguf"]
    path: Path
    max_rows: int
    unpack: bool = True


class MlxTextBackend:
    """Runs a step behind: a step is launched before the last one's tokens are read, so the device never waits
    for Python. A row that ends has run once more than it needed; that result is dropped with the row."""

    def __init__(self, settings: TextModelSettings) -> None:
        self._guard = OwnerGuard()
        self._settings = settings
        # new_stream, not a thread-local one: on a foreign thread it raises instead of silently making a second.
        self._stream = mx.new_stream(mx.default_device())
        mx.set_default_stream(self._stream)
        self._model: Any = None
        self._batch: Batch | None = None
        self._prompts: dict[int, RowCaches] = {}
        self._submits: dict[int, Submit] = {}
        self._pending: Launched | None = None
        self._vocab_size = 0

    @property
    def thread_id(self) -> int:
        return self._guard.thread_id

    def load(self) -> ModelFacts:
        """Owner only. Load, evaluate all, and find out whether rows can share a batch."""
        self._guard.check("load")
        device = current_device()
        loaded = load(self._settings.kind, self._settings.path, device, unpack=self._settings.unpack)
        self._model, self._vocab_size = loaded.model, loaded.vocab_size
        notes = list(loaded.notes)
        max_rows = self._settings.max_rows
        obstacle = unbatchable(new_row(self._model)) or self._probe()
        if obstacle is not None:
            max_rows = 1
            notes.append(f"one request at a time: {obstacle} cannot be batched")
        self.reset()
        return ModelFacts(
            context_length=loaded.context_length,
            vocab_size=loaded.vocab_size,
            max_rows=max_rows,
            weight_bytes=loaded.weight_bytes,
            dtype=loaded.dtype,
            device=f"{device.kind} ({device.name})",
            notes=tuple(notes),
        )

    def step(self, plan: Plan) -> StepResult:
        """Owner only. Drop, join, launch the decode step, prefill, then read the step before."""
        self._guard.check("step")
        batch = self._require_batch()
        self._drop(batch, plan.drop)
        self._join(batch, plan.decode)
        launched = batch.launch() if batch.ids else None
        self._prefill(plan.prefill, wait=launched is None)
        pending, self._pending = self._pending, launched
        rows = pending.read(set(batch.ids)) if pending is not None else []
        return StepResult(tuple(rows))

    def reset(self) -> None:
        """Owner only. Forget every row; a failed step may have left any of them half written."""
        self._guard.check("reset")
        self._pending = None
        self._prompts.clear()
        self._submits.clear()
        self._batch = Batch(self._model, self._vocab_size)

    def close(self) -> None:
        """Owner only. The last act: everything with a stream inside dies here, on the thread that made it."""
        self._guard.check("close")
        self._pending = None
        self._prompts.clear()
        self._submits.clear()
        self._batch = None
        self._model = None
        gc.collect()
        mx.synchronize(self._stream)
        mx.clear_cache()
        mx.clear_streams()

    def _require_batch(self) -> Batch:
        if self._batch is None:
            raise ModelError("the model is not loaded")
        return self._batch

    def _drop(self, batch: Batch, ids: tuple[int, ...]) -> None:
        for request_id in ids:
            self._prompts.pop(request_id, None)
            self._submits.pop(request_id, None)
        if ids:
            batch.drop(set(ids))

    def _join(self, batch: Batch, decode: tuple[int, ...]) -> None:
        joining = [request_id for request_id in decode if request_id in self._prompts]
        batch.join([(self._submits.pop(request_id), self._prompts.pop(request_id)) for request_id in joining])

    def _prefill(self, chunks: tuple[Prefill, ...], *, wait: bool) -> None:
        """The logits stay lazy and are never computed: only the caches are evaluated.

        With rows decoding, the next read bounds how far Python runs ahead of the device; without, wait here.
        """
        arrays: list[mx.array] = []
        for chunk in chunks:
            request_id = chunk.request.request_id
            if chunk.start == 0:
                self._prompts[request_id] = new_row(self._model)
                self._submits[request_id] = chunk.request
            caches = self._prompts[request_id]
            if chunk.end > chunk.start:
                tokens = mx.array([chunk.request.prompt[chunk.start : chunk.end]], dtype=mx.int32)
                self._model(tokens, cache=caches)
                arrays.extend(states(caches))
        if arrays:
            (mx.eval if wait else mx.async_eval)(arrays)

    def _probe(self) -> str | None:
        """Try two rows of unequal length: some models cannot take a batch although their caches can."""
        batch = Batch(self._model, self._vocab_size)
        short, long = new_row(self._model), new_row(self._model)
        try:
            self._model(mx.array([[0, 0]]), cache=long)
            batch.join([(Submit(0, (0,), 1), short), (Submit(1, (0, 0, 0), 1), long)])
            batch.launch().read({0, 1})
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            log.warning("the model cannot run two rows at once: %s", error)
            return "this model"
        return None
