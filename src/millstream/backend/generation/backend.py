"""The MLX generation backend: loads a model and runs the plans of its scheduler, all on the owner thread."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from llguidance import LLMatcher

from millstream.backend.generation.batch import Batch
from millstream.backend.generation.caches.widths import MAX_PADDED_CHUNK
from millstream.backend.generation.decoding import Decoder
from millstream.backend.generation.drafters.drafter import Drafter
from millstream.backend.generation.drafters.drafts import Drafts
from millstream.backend.generation.load import Loaded, ModelLoader
from millstream.backend.generation.prefill.deferred import STEPS_PER_CHUNK, DeferredChunks
from millstream.backend.generation.prefill.prefiller import Passes, Prefiller, Shared
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.preparation import (
    calibrated,
    compiles_kernels,
    start_streams,
    warm_up_model,
    with_spec_prefill,
)
from millstream.backend.generation.sampling.guides import prepare_guides, prepare_vocabulary
from millstream.backend.generation.settings import GenerationSettings
from millstream.backend.generation.spec_prefill.scorer import PromptScorer
from millstream.backend.generation.speculating import Speculating
from millstream.backend.generation.warmup import RUNS, WarmupProgress
from millstream.backend.kernels.fusing import loads_unfused, steps_unfused
from millstream.backend.mlx_backend import MlxBackend, explains_failed_loads
from millstream.backend.phases import LoadPhases
from millstream.engine.background import BackgroundTask
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, RowFailure, StepResult
from millstream.engine.prefix_cache.orders import SavePrefix, SharePrefix
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import ModelError
from millstream.model_facts import GenerationFacts

if TYPE_CHECKING:
    from millstream.backend.generation.media.encoder import Encoded

TEXT_ONLY = "this model takes text only"

log = logging.getLogger(__name__)

__all__ = ["GenerationSettings", "MlxGenerationBackend"]


class MlxGenerationBackend(MlxBackend):
    """Runs one step ahead of what it reports: a step is launched before the tokens of the last one are read, so the
    device never waits for Python. A row that ends has run one step too many, whose result is dropped with the row.

    A step that verifies drafts is the exception: it reads the step before, drafts, and is read itself."""

    def __init__(self, settings: GenerationSettings, drafters: Sequence[Drafter] | None = None) -> None:
        """`drafters`: None for those that the settings and the model bring."""
        super().__init__(cache_limit=settings.cache_limit, blas=settings.blas)
        self._settings = settings
        self._loaded: Loaded | None = None
        self._batch: Batch | None = None
        self._prefiller: Prefiller | None = None
        self._late: set[int] = set()
        """Rows that joined behind the decode pass of the last step."""
        self._store = PrefixStore()
        on_cpu = self._device.is_cpu and not settings.like_gpu
        self._deferred = DeferredChunks(steps_per_chunk=1 if on_cpu else STEPS_PER_CHUNK, wait_for_previous=on_cpu)
        self._scorer: PromptScorer | None = None
        self._drafters = drafters
        self._speculating = Speculating(Drafts())
        self._decoder = Decoder(self._speculating)

    @explains_failed_loads
    @loads_unfused
    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        """Owner only. Load and evaluate the weights, choose a layout, warm up and calibrate."""
        self._guard.check("load")
        settings, device, phases = self._settings, self._device, LoadPhases()
        compiles = compiles_kernels(settings, device)
        loader = ModelLoader(
            settings, device, drafters=self._drafters, matcher=self._matcher, phases=phases, report=report
        )
        weights = loader.read_weights()
        progress = WarmupProgress(report, runs=RUNS if compiles else 0)
        loaded = self._loaded = loader.load(weights, progress, self._describe_device())
        self._speculating = Speculating(loaded.drafting.drafts)
        self._decoder = Decoder(
            self._speculating, loaded.facts.widest_pass, loaded.drafting.model_drafter, queued=loaded.layout.queued
        )
        self.reset()
        if compiles:
            warm_up_model(self, loaded, device, phases, progress)
        if self._deferred.defers:
            loaded.assembly.build_in_parts(loaded.layout)
            self.reset()
        phases.done("warm-up")
        facts = calibrated(self, loaded.facts, self._speculating, device, settings)
        facts, self._scorer = with_spec_prefill(facts, loaded, settings.spec_prefill)
        phases.done("calibration")
        if compiles:
            start_streams(self, facts)
        phases.done("bursts")
        progress.advance()
        # Else the garbage collector would scan all of it between two steps: 20 ms and more.
        gc.freeze()
        log.debug("Load: %s", phases)
        return facts

    @steps_unfused
    def step(self, plan: Plan) -> StepResult:
        """Owner only. Drop rows, join rows, launch the decode step, prefill, then read the step before."""
        self._guard.check("step")
        if self._batch is None or self._prefiller is None:
            raise ModelError("The model is not loaded.")
        batch, prefiller = self._batch, self._prefiller
        unsaved = self._begin(batch, prefiller, plan)
        joining = [request_id for request_id in plan.decode if request_id not in batch.ids]
        shared = self._share(plan.share, joining)
        submits, caches = prefiller.take(joining, shared) if joining else ([], [])
        late = bool(batch.ids) and not plan.drafts and self._joins_late(submits)
        if not late:
            self._join(batch, submits, caches)
        decoding = self._decoder.launch(batch, plan, self._late)
        chunks, encoded, rejected = self._prefill(plan, prefiller)
        unsaved += [
            handle for chunk in plan.prefill if chunk.request.request_id in rejected for handle in chunk.saved_handles
        ]
        self._deferred.evaluate(
            chunks, has_running_rows=decoding.running, complete_now=plan.complete_prefill, parts=plan.prefill_parts
        )
        self._late = {submit.request_id for submit in submits} if late else set()
        if late:
            self._join(batch, submits, caches)
        importance = self._scorer.take() if self._scorer is not None and not self._deferred else ()
        self._store.evict(plan.evict)
        self._compact(has_running_rows=decoding.running, busy=bool(plan.prefill or plan.save or joining))
        if decoding.verification is None:
            self._speculating.guess(plan.guess)  # while the device computes
        rows = self._decoder.finish(batch, decoding)
        return StepResult(
            tuple(rows),
            failed=(*decoding.failed, *(RowFailure(*each) for each in rejected.items())),
            length=decoding.length,
            pass_seconds=decoding.pass_seconds,
            waited=decoding.started > 0,
            asking_seconds=self._speculating.take_seconds(),
            guessed=self._speculating.compared(),
            prompt_logprobs=tuple(prefiller.take_logprobs()),
            encoded=encoded,
            importance=importance,
            shared=tuple((each, sum(piece.tokens for piece in pieces)) for each, pieces in shared.items()),
            unsaved=tuple(unsaved),
            exported=tuple(self._store.exports.advance()),
            exporting=bool(self._store.exports),
            prefilling=bool(self._deferred),
            saving=self._deferred.saving,
        )

    def background_task(self, request: Generate | None) -> BackgroundTask | None:
        """Owner only. The background task that prepares what guides a request's row; with None, the vocabulary for
        grammars, while the model loads."""
        self._guard.check("background_task")
        if request is None:
            return None if "warmup" in self._settings.disabled else prepare_vocabulary(self._settings.grammars)
        return prepare_guides(self._settings.grammars, request)

    def memory_bytes(self) -> int:
        """Owner only. Weights, KV caches of rows and of prompts in prefill, saved prefixes, encoded media."""
        self._guard.check("memory_bytes")
        if (loaded := self._loaded) is None:
            return 0
        drafting = (loaded.drafting.model_drafter, loaded.assembly.mtp)
        parts = (self._batch, self._prefiller, self._store, loaded.encoder, self._scorer, *drafting)
        return loaded.facts.weight_bytes + sum(part.nbytes for part in parts if part is not None)

    def reset(self) -> None:
        """Owner only. Drop every row and all saved prefixes: a failed step may have left any of them half written."""
        self._guard.check("reset")
        loaded = self._ready
        self._decoder.clear()
        self._speculating.clear()
        if loaded.assembly.mtp is not None:
            loaded.assembly.mtp.clear()
        self._deferred.clear()
        self._store.clear()
        if self._scorer is not None:
            self._scorer.clear()
        if loaded.encoder is not None:
            loaded.encoder.clear()
        self._batch, self._prefiller = loaded.assembly.make(loaded.layout, self._store)

    def _drop_arrays(self) -> None:
        self._batch = self._prefiller = self._loaded = self._scorer = self._drafters = None
        self._speculating = Speculating(Drafts())
        self._decoder = Decoder(self._speculating)
        self._deferred.clear()
        self._store.clear()

    @property
    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise ModelError("The model is not loaded.")
        return self._loaded

    def _begin(self, batch: Batch, prefiller: Prefiller, plan: Plan) -> list[int]:
        """Restore and save prefixes, then drop rows. Returns the handles of those that could not be saved."""
        if restored := [array for order in plan.restore for array in self._store.restore(order)]:
            mx.eval(restored)
        unsaved = self._save(batch, prefiller, plan.save, plan.decode)
        batch.keep_vacant(not plan.tight)
        if plan.drop:
            prefiller.drop(plan.drop)
            batch.drop(set(plan.drop))
            self._speculating.drop(plan.drop)
            if self._scorer is not None:
                self._scorer.drop(plan.drop)
            if (encoder := self._ready.encoder) is not None:
                encoder.drop(plan.drop)
        return unsaved

    def _joins_late(self, submits: Sequence[Generate]) -> bool:
        """Whether rows join after the decode pass of their step is launched, and decode from the next one on. What
        changes with a long prompt takes the host as long as a step: half of it is done while the device decodes."""
        return self._deferred.defers and any(len(submit.prompt) > MAX_PADDED_CHUNK for submit in submits)

    def _join(self, batch: Batch, submits: Sequence[Generate], caches: Sequence[Any]) -> None:
        if not submits:
            return
        batch.join(submits, caches)
        self._speculating.join(submits)
        if (encoder := self._ready.encoder) is not None:
            encoder.release_features([submit.request_id for submit in submits])

    def _matcher(self, request_id: int) -> LLMatcher | None:
        return None if self._batch is None else self._batch.matcher(request_id)

    def _prefill(self, plan: Plan, prefiller: Prefiller) -> tuple[Passes, Encoded, dict[int, str]]:
        """Prefill the plan's chunks and encode its media. Returns the arrays to evaluate, what was encoded, and why
        the media of some requests were rejected."""
        if (encoder := self._ready.encoder) is not None:
            return encoder.step(plan, prefiller)
        passes = prefiller.prefill([chunk for chunk in plan.prefill if not chunk.scores])
        if self._scorer is not None:
            passes += self._scorer.read(chunk for chunk in plan.prefill if chunk.scores)
        return passes, (), {order.request.request_id: TEXT_ONLY for order in plan.encode}

    def _share(self, orders: Sequence[SharePrefix], joining: Sequence[int]) -> Shared:
        """The tokens that rows go on to read in the prefix cache."""
        runs = self._ready.layout.share_runs
        return {
            order.request_id: self._store.share(order.handles, runs) for order in orders if order.request_id in joining
        }

    def _save(
        self, batch: Batch, prefiller: Prefiller, orders: Sequence[SavePrefix], joining: Sequence[int]
    ) -> list[int]:
        """Save prefixes of rows and of prompts that end in prefill. Returns the handles of those that could not be
        saved."""
        copies: list[mx.array] = []
        unsaved: list[int] = []
        for order in orders:
            in_batch = order.request_id in batch.ids
            arrays = batch.save(order, self._store) if in_batch else prefiller.save(order)
            if arrays is None:
                unsaved += order.all_handles
            elif in_batch or order.request_id in joining or not self._deferred.append(arrays):
                # Else its last chunk may be among the deferred ones.
                copies += arrays
        if copies:
            # If MLX writes to the slots, it would copy all of them while a step that reads them is under way.
            (mx.async_eval if self._ready.layout.in_place else mx.eval)(copies)
        return unsaved

    def _compact(self, *, has_running_rows: bool, busy: bool) -> None:
        """Compact partly evicted runs of blocks: all of them if no row decodes, else one per quiet step; also in a busy
        step if several wait."""
        if not has_running_rows:
            while self._store.compactable:
                mx.eval(self._store.compact())
        elif self._store.compactable > (1 if busy else 0):
            mx.async_eval(self._store.compact())  # type: ignore[no-untyped-call]
