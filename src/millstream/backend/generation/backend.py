"""The MLX backend for text models. Made, used and freed on the owner thread."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from millstream.backend.device import current_device
from millstream.backend.generation.batch import Batch, Launched
from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.layout import GenerationSettings, Layout
from millstream.backend.generation.prefill.deferred import STEPS_PER_CHUNK, DeferredChunks
from millstream.backend.generation.prefill.prefiller import Prefiller
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.sampling.guides import prepare_grammar
from millstream.backend.generation.warmup import warm_up
from millstream.backend.weights.identity import identity_of
from millstream.backend.weights.loading import load
from millstream.backend.weights.materialize import evaluate_all
from millstream.engine.background import BackgroundTask
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, Prefill, RowFailure, RowOutput, StepResult
from millstream.engine.ownership import OwnerGuard, at_thread_end
from millstream.engine.prefix_cache.orders import SavePrefix
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import ModelError
from millstream.model_facts import GenerationFacts

if TYPE_CHECKING:
    from millstream.backend.generation.media.encoder import Encoded, MediaEncoder

TEXT_ONLY = "this model takes text only"

log = logging.getLogger(__name__)

__all__ = ["GenerationSettings", "MlxGenerationBackend"]


class MlxGenerationBackend:
    """Runs a step behind: a step is launched before the last one's tokens are read, so the device never waits
    for Python. A row that ends has run once more than it needed; that result is dropped with the row."""

    def __init__(self, settings: GenerationSettings) -> None:
        self._guard = OwnerGuard()
        self._settings = settings
        # The thread's own stream, not a new one: each stream of the CPU costs an OS thread for good, and the owner
        # threads are used again. It is a plain stream: on a foreign thread it raises instead of making a second.
        self._stream = mx.default_stream(mx.default_device())
        at_thread_end(mx.clear_streams)  # a thread that ends with streams can abort the process when that exits
        if settings.cache_limit is not None:
            mx.set_cache_limit(settings.cache_limit)
        self._model: Any = None
        self._device = current_device()
        self._layout: Layout | None = None
        self._batch: Batch | None = None
        self._prompts: Prefiller | None = None
        self._pending: Launched | None = None
        self._weight_bytes = 0
        self._kept = PrefixStore()
        on_cpu = self._device.is_cpu and not settings.like_gpu
        self._deferred = DeferredChunks(steps_per_chunk=1 if on_cpu else STEPS_PER_CHUNK, wait_for_previous=on_cpu)
        self._encoder: MediaEncoder | None = None

    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        """Owner only. Load, evaluate all, choose how rows share a batch, and warm up."""
        self._guard.check("load")
        settings = self._settings
        loaded = load(settings.kind, settings.path, self._device, unpack=settings.unpack)
        self._model = loaded.model
        if loaded.whole is not None:
            # Here, since mlx-vlm may not be installed.
            from millstream.backend.generation.media.encoder import MediaEncoder

            self._encoder = MediaEncoder(self._model, settings.feature_bytes)
        layout = self._layout = Layout(settings, self._device, loaded.model, loaded.vocab_size, self._encoder)
        layout.shape_layers()
        self._weight_bytes = evaluate_all(self._model, report)
        notes = list(loaded.notes)
        obstacle = layout.choose(self._try_two_rows, self._disagreement)
        max_rows = settings.max_rows
        if obstacle is not None:
            max_rows = 1
            notes.append(f"one request at a time: {obstacle} cannot be batched")
        if (packing := layout.packing) is not None:
            notes.append(f"keys and values in {packing.bits} bits, in groups of {packing.group_size}")
        self.reset()
        token_bytes, keeps = layout.probe()
        facts = GenerationFacts(
            context_length=loaded.context_length,
            vocab_size=loaded.vocab_size,
            max_rows=max_rows,
            weight_bytes=self._weight_bytes,
            dtype=loaded.dtype,
            device=self._describe_device(),
            notes=tuple(notes),
            prefix_sizes=keeps,
            kv_bytes_per_token=token_bytes,
            identity=identity_of(settings.path, loaded.dtype, self._device.kind, settings.unpack, settings.kv_bits),
            media=self._encoder.kinds if self._encoder else (),
            whole_media=self._encoder is not None and self._model.whole_media,
        )
        self._warm_up(facts)
        # The collector would look at all of it between two steps: 20 ms and more.
        gc.freeze()
        return facts

    def step(self, plan: Plan) -> StepResult:
        """Owner only. Drop, join, launch the decode step, prefill, then read the step before."""
        self._guard.check("step")
        if self._batch is None or self._prompts is None:
            raise ModelError("the model is not loaded")
        batch, prompts = self._batch, self._prompts
        if loaded := [array for order in plan.restore for array in self._kept.restore(order)]:
            mx.eval(loaded)
        unsaved = self._keep(batch, plan.save)
        if plan.drop:
            prompts.drop(plan.drop)
            batch.drop(set(plan.drop))
            if self._encoder is not None:
                self._encoder.drop(plan.drop)
        joining = [request_id for request_id in plan.decode if request_id not in batch.ids]
        if joining:
            batch.join(*prompts.take(joining))
            if self._encoder is not None:
                self._encoder.release_features(joining)
        launched, rows, failed = self._decode(batch)
        read, seen, unfit = self._read_prompts(plan, prompts)
        unsaved += [
            handle for chunk in plan.prefill if chunk.request.request_id in unfit for handle in chunk.saved_handles
        ]
        self._deferred.evaluate(read, has_running_rows=launched is not None, complete_now=not plan.may_span_steps)
        self._kept.evict(plan.evict)
        self._trim(beside=launched is not None, busy=bool(plan.prefill or plan.save or joining))
        rows = self._read(batch) if rows is None else rows
        self._pending = launched
        return StepResult(
            tuple(rows),
            failed=(*failed, *(RowFailure(*each) for each in unfit.items())),
            prompt_logprobs=tuple(prompts.take_logprobs()),
            encoded=seen,
            unsaved=tuple(unsaved),
            exported=tuple(self._kept.exports.advance()),
            exporting=bool(self._kept.exports),
            prefilling=bool(self._deferred),
        )

    def background_task(self, request: Generate | None) -> BackgroundTask | None:
        """Owner only. Grammars are prepared by another thread, and the vocabulary for them while the model loads."""
        self._guard.check("background_task")
        if request is None:
            return None if "warmup" in self._settings.disabled else prepare_grammar(self._settings.grammars, None)
        return None if request.grammar is None else prepare_grammar(self._settings.grammars, request.grammar)

    def memory_bytes(self) -> int:
        """Owner only. Weights, and the keys and values of rows and of prompts that are being read."""
        self._guard.check("memory_bytes")
        rows = (self._batch.nbytes if self._batch else 0) + (self._prompts.nbytes if self._prompts else 0)
        return self._weight_bytes + rows + self._kept.nbytes + (self._encoder.nbytes if self._encoder else 0)

    def reset(self) -> None:
        """Owner only. Forget every row; a failed step may have left any of them half written."""
        self._guard.check("reset")
        self._pending = None
        self._deferred.clear()
        self._kept.clear()
        if self._encoder is not None:
            self._encoder.clear()
        assert self._layout is not None, "nothing is loaded"
        self._batch, self._prompts = self._layout.fresh(self._kept)

    def close(self) -> None:
        """Owner only. The last act: everything with a stream inside dies here, on the thread that made it."""
        self._guard.check("close")
        self._pending = self._batch = self._prompts = self._layout = self._model = self._encoder = None
        self._deferred.clear()
        self._kept.clear()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        try:
            mx.synchronize(self._stream)
        finally:
            mx.clear_cache()  # not the streams: without its own, a thread can compute no more

    def _decode(self, batch: Batch) -> tuple[Launched | None, list[RowOutput] | None, list[RowFailure]]:
        """Launch a step. The last one's rows, if they had to be read for it, and those that cannot go on."""
        if not batch.ids:
            return None, None, []
        logits = batch.forward()
        if not batch.guided:
            return batch.launch(logits), None, []
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        rows = self._read(batch)
        mask, failed = batch.guide(rows)
        return batch.launch(logits, mask), rows, failed

    def _read_prompts(self, plan: Plan, prompts: Prefiller) -> tuple[list[mx.array], Encoded, dict[int, str]]:
        """Read the plan's chunks and look at its media: what to evaluate, what was seen, and whose media do not fit."""
        if self._encoder is not None:
            return self._encoder.step(plan, prompts)
        return prompts.prefill(plan.prefill), (), {look.request.request_id: TEXT_ONLY for look in plan.encode}

    def _read(self, batch: Batch) -> list[RowOutput]:
        """What the last step gave the rows that are still there. Waits for it."""
        return [] if self._pending is None else self._pending.read(batch.ids)

    def _keep(self, batch: Batch, orders: Sequence[SavePrefix]) -> list[int]:
        """Keep of rows what the orders say. The handles for which that could not be done."""
        copies: list[mx.array] = []
        unsaved: list[int] = []
        for order in orders:
            if (arrays := batch.save(order, self._kept)) is None:
                unsaved += order.all_handles
            else:
                copies += arrays
        if copies:
            # Where MLX writes to the slots, it would copy all of them while one of their readers is under way.
            (mx.async_eval if self._layout is not None and self._layout.in_place else mx.eval)(copies)
        return unsaved

    def _trim(self, *, beside: bool, busy: bool) -> None:
        """Free what nobody wants of what is kept. Beside rows, in a step that has little else to do, unless it waits in
        several places."""
        if not beside:
            while self._kept.compactable:
                mx.eval(self._kept.compact())
        elif self._kept.compactable > (1 if busy else 0):
            mx.async_eval(self._kept.compact())  # type: ignore[no-untyped-call]

    def _try_two_rows(self) -> None:
        """Of unequal length, and of tokens that mean something, as the first ones of a vocabulary may not."""
        assert self._layout is not None, "nothing is loaded"
        words = [self._layout.vocab_size // part for part in (2, 3, 5, 7)]
        short, long = Generate(0, (words[0],), 1), Generate(1, tuple(words[1:]), 1)
        self.reset()
        self.step(Plan(prefill=(Prefill(short, 0, 0), Prefill(long, 0, 2))))
        self.step(Plan(decode=(0, 1)))
        self.step(Plan(decode=(0, 1)))

    def _disagreement(self) -> float:
        """How far the logits of two rows together are from those of each alone, relative to their size."""
        assert self._layout is not None, "nothing is loaded"
        prompts = [tuple(self._layout.vocab_size // (2 + place) for place in range(length)) for length in (1, 9)]
        alone = [self._model(mx.array([prompt]), cache=new_row_caches(self._model))[0, -1] for prompt in prompts]
        self.reset()
        assert self._batch is not None and self._prompts is not None
        submits = [Generate(number, prompt, 1) for number, prompt in enumerate(prompts)]
        mx.eval(self._prompts.prefill([Prefill(submit, 0, len(submit.prompt) - 1) for submit in submits]))
        self._batch.join(*self._prompts.take([0, 1]))
        together = self._batch.forward()
        far = [_apart(one, other) for one, other in zip(alone, together, strict=False)]
        self.reset()
        return max(far)

    def _describe_device(self) -> str:
        blas = f", {self._settings.blas}" if self._settings.blas and self._device.is_cpu else ""
        return f"{self._device.kind} ({self._device.name}){blas}"

    def _warm_up(self, facts: GenerationFacts) -> None:
        """On the CPU nothing is compiled, so there is nothing to warm."""
        if self._device.is_cpu or "warmup" in self._settings.disabled:
            return
        started = time.monotonic()
        warm_up(
            self,
            max_rows=facts.max_rows,
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
        )
        log.info("warmed up in %.1f s", time.monotonic() - started)


def _apart(one: mx.array, other: mx.array) -> float:
    """The distance of two vectors of logits, over their spread."""
    one, other = (each.astype(mx.float32) - mx.mean(each.astype(mx.float32)) for each in (one, other))
    return float((mx.linalg.norm(one - other) / mx.linalg.norm(one)).item())  # type: ignore[arg-type]
