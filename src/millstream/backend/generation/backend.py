"""The MLX generation backend: loads a model and runs the plans of its scheduler, all on the owner thread."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from llguidance import LLMatcher

from millstream.backend.device import available_bytes, free_bytes
from millstream.backend.generation.assembly import Assembly
from millstream.backend.generation.batch import Batch, Launched
from millstream.backend.generation.bursts import BURST_CONTEXT, BURST_PREFIX_CACHE, run_bursts
from millstream.backend.generation.caches.widths import MAX_PADDED_CHUNK
from millstream.backend.generation.calibration import MIN_WEIGHT_BYTES, calibrate
from millstream.backend.generation.drafters.any_tokens import AnyTokens
from millstream.backend.generation.drafters.draft_model import DraftModel, load_draft_model
from millstream.backend.generation.drafters.drafter import Drafter
from millstream.backend.generation.drafters.drafts import Drafts
from millstream.backend.generation.drafters.grammar import GrammarDrafter
from millstream.backend.generation.drafters.model_drafter import ModelDrafter
from millstream.backend.generation.drafters.prediction import PredictionDrafter
from millstream.backend.generation.drafters.prompt_lookup import SURE, PromptLookupDrafter
from millstream.backend.generation.layout import Layout, LayoutChooser
from millstream.backend.generation.mtp.attach import AttachedMtp, attach_mtp
from millstream.backend.generation.mtp.drafter import MtpDrafter
from millstream.backend.generation.prefill.deferred import STEPS_PER_CHUNK, DeferredChunks
from millstream.backend.generation.prefill.prefiller import Passes, Prefiller, Shared
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.sampling.guides import prepare_grammar
from millstream.backend.generation.settings import GenerationSettings
from millstream.backend.generation.spec_prefill.scorer import PromptScorer
from millstream.backend.generation.spec_prefill.spec_prefill import Declined, spec_prefill
from millstream.backend.generation.speculating import Speculating
from millstream.backend.generation.trial import TwoRowTrial
from millstream.backend.generation.verification import Verification, joined
from millstream.backend.generation.warmup import RUNS, WarmupProgress, warm_up, warm_up_passes
from millstream.backend.kernels.compiled import compile_costs, rehearse
from millstream.backend.kernels.small_matmul import supported_here
from millstream.backend.mlx_backend import MlxBackend, tells_lost_device
from millstream.backend.phases import LoadPhases
from millstream.backend.weights.identity import identity_of
from millstream.backend.weights.loading import LoadedModel, load
from millstream.backend.weights.materialize import evaluate_all
from millstream.backend.weights.unpacking import StaysPacked, kernels_take, nothing_packed
from millstream.engine.background import BackgroundTask
from millstream.engine.generation.cost_model import workspace_bytes
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, RowFailure, RowOutput, StepResult
from millstream.engine.generation.speculation.choice import Odds
from millstream.engine.generation.speculation.lengths import LENGTHS
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.prefix_cache.orders import SavePrefix, SharePrefix
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import ModelError
from millstream.model_facts import GenerationFacts

if TYPE_CHECKING:
    from millstream.backend.generation.media.encoder import Encoded, MediaEncoder

MOST_WARM_TOKENS = 4096
"""Prompts that share a pass have at most so many tokens together in the warm-up."""
TEXT_ONLY = "this model takes text only"

log = logging.getLogger(__name__)

__all__ = ["GenerationSettings", "MlxGenerationBackend"]


@dataclass(slots=True)
class Decoding:
    """The decode pass of a step, as it is under way: plain, or verifying drafts."""

    launched: Launched | None = None
    verification: Verification | None = None
    rows: list[RowOutput] | None = None
    """Of the step before, if it had to be read for this one: a draft and a grammar need its tokens."""
    failed: list[RowFailure] = field(default_factory=list)
    """Rows that cannot follow their grammar."""
    sources: Mapping[int, str] = field(default_factory=dict)
    """Where each row's draft comes from."""
    started: float = 0.0
    """When drafting began."""

    @property
    def running(self) -> bool:
        return self.launched is not None or self.verification is not None


class MlxGenerationBackend(MlxBackend):
    """Runs one step ahead of what it reports: a step is launched before the tokens of the last one are read, so the
    device never waits for Python. A row that ends has run one step too many, whose result is dropped with the row.

    A step that verifies drafts is the exception: it reads the step before, drafts, and is read itself."""

    def __init__(self, settings: GenerationSettings, drafters: Sequence[Drafter] | None = None) -> None:
        """`drafters`: None for those that the settings and the model bring."""
        super().__init__(cache_limit=settings.cache_limit, blas=settings.blas)
        self._settings = settings
        self._model: Any = None
        self._assembly: Assembly | None = None
        self._layout: Layout | None = None
        self._batch: Batch | None = None
        self._prefiller: Prefiller | None = None
        self._pending: Launched | None = None
        self._late: set[int] = set()
        """Rows that joined behind the decode pass of the last step."""
        self._weight_bytes = 0
        self._widest_pass: Callable[[int], int | None] = lambda rows: None
        """See `GenerationFacts.widest_pass`."""
        self._compiled_before = 0
        """Kernels that this process had compiled when the load began."""
        self._store = PrefixStore()
        on_cpu = self._device.is_cpu and not settings.like_gpu
        self._deferred = DeferredChunks(steps_per_chunk=1 if on_cpu else STEPS_PER_CHUNK, wait_for_previous=on_cpu)
        self._encoder: MediaEncoder | None = None
        self._scorer: PromptScorer | None = None
        self._drafters = drafters
        self._speculating = Speculating(Drafts())
        self._draft_model: DraftModel | None = None
        self._model_drafter: ModelDrafter | None = None
        self._mtp: MtpDrafter | None = None

    @tells_lost_device
    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        """Owner only. Load and evaluate the weights, choose a layout, warm up and calibrate."""
        self._guard.check("load")
        settings = self._settings
        phases = LoadPhases()
        self._compiled_before, _ = compile_costs()
        loaded = load(
            settings.kind,
            settings.path,
            self._device,
            unpack=settings.unpack,
            keep_packed=self._packed_layers,
            report=report,
        )
        phases.done("weights")
        warming_up = WarmupProgress(report, runs=RUNS if self._compiles_kernels else 0)
        self._model = loaded.model
        if loaded.is_vision:
            # Imported here, since mlx-vlm may not be installed.
            from millstream.backend.generation.media.encoder import MediaEncoder
            from millstream.backend.generation.media.language_parts import language_part

            self._model = language_part(loaded.model)
            self._encoder = MediaEncoder(self._model, settings.feature_bytes)
        mtp = self._attach_mtp(loaded)
        chooser = LayoutChooser(settings, self._device, self._model, takes_media=self._encoder is not None)
        chooser.shape_layers()
        self._weight_bytes = evaluate_all(self._model) + mtp.weight_bytes
        phases.done("layers")
        warming_up.advance()
        assembly = self._assembly = Assembly(
            self._model, loaded.vocab_size, encoder=self._encoder, grammars=settings.grammars, mtp=self._mtp
        )
        layout = self._layout = chooser.choose(TwoRowTrial(assembly))
        phases.done("layout")
        warming_up.advance()
        notes = [*loaded.notes, layout.fast_paths, *layout.notes]
        max_rows = settings.max_rows
        if layout.one_row_reason is not None:
            max_rows = 1
            notes.append(f"one request at a time: {layout.one_row_reason}")
        if (packing := layout.packing) is not None:
            notes.append(f"KV cache quantised to {packing.bits} bits in groups of {packing.group_size}")
        self.reset()
        token_bytes, prefix_sizes = assembly.measure(layout)
        if settings.draft is not None:
            draft = self._draft_model = load_draft_model(settings, self._device, self._packed_layers, report)
            self._weight_bytes += draft.weight_bytes
            token_bytes += draft.kv_bytes_per_token
            phases.done("draft model")
        notes += self._take_drafters(loaded.vocab_size)
        notes += [mtp.note] if mtp.note and self._mtp is mtp.drafter else []
        phases.done("memory")
        warming_up.advance()
        facts = GenerationFacts(
            context_length=loaded.context_length,
            vocab_size=loaded.vocab_size,
            max_rows=max_rows,
            weight_bytes=self._weight_bytes,
            dtype=loaded.dtype,
            device=self._describe_device(),
            notes=tuple(notes),
            prefix_sizes=prefix_sizes,
            kv_bytes_per_token=token_bytes,
            identity=identity_of(settings.path, loaded.dtype, self._device.kind, settings.unpack, settings.kv_bits),
            media=self._encoder.kinds if self._encoder else (),
            whole_media=self._encoder is not None and self._model.whole_media,
            share_tokens=layout.share_tokens,
            kv_layout="classes" if layout.caches in ("classes", "mixed") else "rectangle",
            device_memory=self._weight_bytes + max(0, free_bytes(self._device)),
            feature_bytes=settings.feature_bytes if self._encoder is not None else 0,
            drafters=self._speculating.drafts.names,
            exact_passes=layout.exact_passes,
        )
        self._warm_up(facts, warming_up)
        if self._model_drafter is not None and self._compiles_kernels:
            self._model_drafter.warm_up()
        if self._deferred.defers:
            assembly.build_in_parts(layout)
            self.reset()
        phases.done("warm-up")
        self._widest_pass = facts.widest_pass
        facts = self._with_spec_prefill(self._calibrate(facts))
        phases.done("calibration")
        self._run_bursts(facts)
        phases.done("bursts")
        warming_up.advance()
        # Else the garbage collector would scan all of it between two steps: 20 ms and more.
        gc.freeze()
        log.debug("Load: %s", phases)
        return facts

    def step(self, plan: Plan) -> StepResult:
        """Owner only. Drop rows, join rows, launch the decode step, prefill, then read the step before."""
        self._guard.check("step")
        if self._batch is None or self._prefiller is None:
            raise ModelError("The model is not loaded.")
        batch, prefiller = self._batch, self._prefiller
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
            if self._encoder is not None:
                self._encoder.drop(plan.drop)
        joining = [request_id for request_id in plan.decode if request_id not in batch.ids]
        shared = self._share(plan.share, joining)
        submits, caches = prefiller.take(joining, shared) if joining else ([], [])
        late = bool(batch.ids) and not plan.drafts and self._joins_late(submits)
        if not late:
            self._join(batch, submits, caches)
        decoding = self._decode(batch, plan)
        chunks, encoded, rejected = self._prefill(plan, prefiller)
        unsaved += [
            handle for chunk in plan.prefill if chunk.request.request_id in rejected for handle in chunk.saved_handles
        ]
        self._deferred.evaluate(
            chunks,
            has_running_rows=decoding.running,
            complete_now=plan.complete_prefill,
            parts=plan.prefill_parts,
        )
        self._late = {submit.request_id for submit in submits} if late else set()
        if late:
            self._join(batch, submits, caches)
        importance = self._scorer.take() if self._scorer is not None and not self._deferred else ()
        self._store.evict(plan.evict)
        self._compact(has_running_rows=decoding.running, busy=bool(plan.prefill or plan.save or joining))
        if decoding.verification is None:
            self._speculating.guess(plan.guess)  # while the device computes
        rows = self._finish(batch, decoding)
        verification = decoding.verification
        return StepResult(
            tuple(rows),
            failed=(*decoding.failed, *(RowFailure(*each) for each in rejected.items())),
            length=1 if verification is None else verification.length,
            pass_seconds=0.0 if verification is None else time.monotonic() - decoding.started,
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
        """Owner only. The background task that prepares a request's grammar; with None, the vocabulary for grammars,
        while the model loads."""
        self._guard.check("background_task")
        if request is None:
            return None if "warmup" in self._settings.disabled else prepare_grammar(self._settings.grammars, None)
        return None if request.grammar is None else prepare_grammar(self._settings.grammars, request.grammar)

    def memory_bytes(self) -> int:
        """Owner only. Weights, KV caches of rows and of prompts in prefill, saved prefixes, encoded media."""
        self._guard.check("memory_bytes")
        rows = (self._batch.nbytes if self._batch else 0) + (self._prefiller.nbytes if self._prefiller else 0)
        parts = (self._encoder, self._scorer, self._model_drafter, self._mtp)
        return self._weight_bytes + rows + self._store.nbytes + sum(part.nbytes for part in parts if part is not None)

    def reset(self) -> None:
        """Owner only. Drop every row and all saved prefixes: a failed step may have left any of them half written."""
        self._guard.check("reset")
        self._pending = None
        self._speculating.clear()
        if self._mtp is not None:
            self._mtp.clear()
        self._deferred.clear()
        self._store.clear()
        if self._scorer is not None:
            self._scorer.clear()
        if self._encoder is not None:
            self._encoder.clear()
        assert self._assembly is not None and self._layout is not None, "no model is loaded"
        self._batch, self._prefiller = self._assembly.make(self._layout, self._store)

    def _drop_arrays(self) -> None:
        self._pending = self._batch = self._prefiller = self._model = self._encoder = self._scorer = None
        self._assembly = self._layout = self._drafters = self._draft_model = self._model_drafter = self._mtp = None
        self._speculating = Speculating(Drafts())
        self._deferred.clear()
        self._store.clear()

    def _joins_late(self, submits: Sequence[Generate]) -> bool:
        """Whether rows join after the decode pass of their step is launched, and decode from the next one on. What
        changes with a long prompt takes the host as long as a step: half of it is done while the device decodes."""
        return self._deferred.defers and any(len(submit.prompt) > MAX_PADDED_CHUNK for submit in submits)

    def _join(self, batch: Batch, submits: Sequence[Generate], caches: Sequence[Any]) -> None:
        if not submits:
            return
        batch.join(submits, caches)
        self._speculating.join(submits)
        if self._encoder is not None:
            self._encoder.release_features([submit.request_id for submit in submits])

    def _decode(self, batch: Batch, plan: Plan) -> Decoding:
        """Launch the decode pass of a step."""
        if not batch.ids:
            return Decoding()
        decoding = self._draft(batch, dict(plan.drafts), plan.odds) if plan.drafts else Decoding()
        if decoding.verification is not None:
            return decoding
        logits = batch.forward()
        if not batch.guided:
            decoding.launched = batch.launch(logits)
            return decoding
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        unread = decoding.rows is None
        rows = decoding.rows = self._read(batch) if decoding.rows is None else decoding.rows
        mask, failed = batch.guide(rows if unread else ())
        decoding.failed += failed
        decoding.launched = batch.launch(logits, mask)
        return decoding

    def _draft(self, batch: Batch, wanted: dict[int, int], odds: Odds | None) -> Decoding:
        """Verify drafts, if there are some that pay. Else a plain step is due; if it was not worth it to read the one
        before for the drafts, that goes on."""
        speculating, rows = self._speculating, len(batch.ids)
        wanted = self._exact(batch, wanted)
        if not batch.supports_length or not wanted:
            return Decoding()
        if self._pending is not None and not batch.guided and not speculating.expects_drafts(wanted, odds, rows):
            return Decoding()
        decoding = Decoding(rows=self._read(batch))
        assert decoding.rows is not None
        self._pending = None
        decoding.failed += batch.catch_up(decoding.rows)
        decoding.started = time.monotonic()
        drafts = speculating.propose(wanted, odds, rows)
        if self._model_drafter is not None:
            decoding.started += self._model_drafter.read_seconds
        if drafts:
            decoding.sources = dict(speculating.sources)
            decoding.verification, failed = batch.launch_drafts(drafts)
            decoding.failed += failed
        return decoding

    def _exact(self, batch: Batch, wanted: dict[int, int]) -> dict[int, int]:
        """Drafts so short that their pass gives the numbers of plain steps, which are as wide as they were for rows
        that have left. None for rows that joined late: they have not decoded yet. `wanted`: most tokens by request."""
        wanted = {row: tokens for row, tokens in wanted.items() if row not in self._late}
        most = self._widest_pass(batch.size)
        if most is None:
            return wanted
        longest = max((length for length in LENGTHS if length * len(batch.ids) <= most), default=1)
        return {row: min(tokens, longest - 1) for row, tokens in wanted.items()} if longest > 1 else {}

    def _finish(self, batch: Batch, decoding: Decoding) -> list[RowOutput]:
        """Wait for what a step reports: the plain step before it, and its own pass if that verifies drafts."""
        rows = self._read(batch) if decoding.rows is None else decoding.rows
        self._pending = decoding.launched
        if decoding.verification is None:
            return rows
        verified, failed = decoding.verification.read()
        self._speculating.gained(verified)
        decoding.failed += failed
        before = {row.request_id: row for row in rows}
        return [joined(before.get(row.request_id), row, decoding.sources.get(row.request_id, "")) for row in verified]

    def _take_drafters(self, vocab_size: int) -> list[str]:
        """Make the drafters of the model. Returns notes: why it has none."""
        assert self._layout is not None and self._batch is not None
        if (reason := self._layout.no_drafts or self._batch.no_drafts) is not None:
            self._detach_mtp()
            return [f"no speculative decoding: {reason}"]
        if not self._settings.speculation:
            return ["no speculative decoding: --speculation off"]
        drafters = self._drafters
        if drafters is None:
            drafters = [GrammarDrafter(self._matcher, vocab_size), PredictionDrafter()]
            if self._draft_model is not None:
                assert self._settings.draft is not None
                self._model_drafter = ModelDrafter(self._draft_model, self._settings.draft.depth)
                drafters += [PromptLookupDrafter(SURE), self._model_drafter]
            elif self._mtp is not None:
                drafters += [PromptLookupDrafter(SURE), self._mtp]
            else:
                drafters += [PromptLookupDrafter()]
        self._speculating = Speculating(Drafts(drafters))
        return [] if self._draft_model is None else [self._draft_model.note]

    def _attach_mtp(self, loaded: LoadedModel) -> AttachedMtp:
        """Load the model's head, if its folder has one."""
        settings = self._settings
        if settings.kind != "folder" or self._drafters is not None or not settings.speculation:
            return AttachedMtp()
        if settings.draft is not None:
            return AttachedMtp(note="MTP weights are not used: the draft model drafts")
        attached = attach_mtp(settings.path, loaded.config, self._model, self._device, unpack=settings.unpack)
        self._mtp = attached.drafter
        return attached

    def _detach_mtp(self) -> None:
        """Drop a head that cannot be used, and its weights."""
        if self._mtp is None:
            return
        assert self._assembly is not None
        self._weight_bytes -= self._mtp.detach()
        self._mtp = self._assembly.mtp = None
        self.reset()

    def _matcher(self, request_id: int) -> LLMatcher | None:
        return None if self._batch is None else self._batch.matcher(request_id)

    def _prefill(self, plan: Plan, prefiller: Prefiller) -> tuple[Passes, Encoded, dict[int, str]]:
        """Prefill the plan's chunks and encode its media. Returns the arrays to evaluate, what was encoded, and why
        the media of some requests were rejected."""
        if self._encoder is not None:
            return self._encoder.step(plan, prefiller)
        passes = prefiller.prefill([chunk for chunk in plan.prefill if not chunk.scores])
        if self._scorer is not None:
            passes += self._scorer.read(chunk for chunk in plan.prefill if chunk.scores)
        return passes, (), {order.request.request_id: TEXT_ONLY for order in plan.encode}

    def _read(self, batch: Batch) -> list[RowOutput]:
        """Wait for the last step; its tokens, for the rows that are still in the batch."""
        if self._pending is None:
            return []
        rows = self._pending.read(batch.ids)
        self._speculating.gained(rows)
        return rows

    def _share(self, orders: Sequence[SharePrefix], joining: Sequence[int]) -> Shared:
        """The tokens that rows go on to read in the prefix cache."""
        assert self._layout is not None
        runs = self._layout.share_runs
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
            (mx.async_eval if self._layout is not None and self._layout.in_place else mx.eval)(copies)
        return unsaved

    def _compact(self, *, has_running_rows: bool, busy: bool) -> None:
        """Compact partly evicted runs of blocks: all of them if no row decodes, else one per quiet step; also in a busy
        step if several wait."""
        if not has_running_rows:
            while self._store.compactable:
                mx.eval(self._store.compact())
        elif self._store.compactable > (1 if busy else 0):
            mx.async_eval(self._store.compact())  # type: ignore[no-untyped-call]

    @property
    def _packed_layers(self) -> StaysPacked:
        return kernels_take if self._keeps_packed else nothing_packed

    @property
    def _keeps_packed(self) -> bool:
        """True if our kernels compute with quantised weights as they are."""
        if self._device.kind != "cuda" or not supported_here():
            return False
        return self._settings.disabled.isdisjoint({"kernel", "fused-matmul", "packed-matmul"})

    @property
    def _compiles_kernels(self) -> bool:
        """The CPU has none to compile."""
        return not self._device.is_cpu and "warmup" not in self._settings.disabled

    def _warm_up(self, facts: GenerationFacts, progress: WarmupProgress) -> None:
        """Compile kernels before the first request."""
        if not self._compiles_kernels:
            return
        phases = LoadPhases()

        def after_run(name: str) -> None:
            phases.done(name)
            progress.advance()

        assert self._assembly is not None and self._layout is not None, "the model is loaded"
        self._assembly.warm_up_prompts(self._layout, min(MOST_WARM_TOKENS, facts.context_length), facts.max_rows)
        phases.done("prompts")
        run = functools.partial(
            warm_up,
            self,
            max_rows=facts.max_rows,
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            passes=functools.partial(self._warm_up_passes, facts) if facts.drafters else lambda: None,
        )
        if compile_costs()[0] > self._compiled_before:
            # Not all kernels were on disk: those that are still missing compile at once.
            rehearse(run)
            self.reset()
            phases.done("rehearsal")
        run(after_run=after_run)
        log.info("Warmed up in %.1f s", sum(seconds for _, seconds in phases.phases))
        log.debug("Warm-up: %s", phases)

    def _run_bursts(self, facts: GenerationFacts) -> None:
        """Have streams start together, if the scheduler that plans them can be like the engine's."""
        if self._compiles_kernels and facts.calibration is not None and facts.context_length >= BURST_CONTEXT:
            plain = dataclasses.replace(facts, drafters=(), spec_prefill=None)
            scheduler = make_scheduler(SchedulerSettings(prefix_cache_bytes=BURST_PREFIX_CACHE), plain)
            done = run_bursts(self, scheduler, rows=facts.max_rows, vocab_size=facts.vocab_size)
            log.debug("%d bursts came to their end", done)

    def _warm_up_passes(self, facts: GenerationFacts) -> None:
        assembly, layout = self._assembly, self._layout
        assert assembly is not None and layout is not None, "the model is loaded"
        warm_up_passes(
            lambda: assembly.make(layout, PrefixStore()), max_rows=facts.max_rows, vocab_size=facts.vocab_size
        )
        self.reset()
        if self._mtp is not None:
            self._mtp.warm_up()

    def _with_spec_prefill(self, facts: GenerationFacts) -> GenerationFacts:
        """The facts with how long prompts are read in part, or with a note that says why not."""
        settings, layout = self._settings.spec_prefill, self._layout
        if settings is None or layout is None:
            return facts
        draft = self._draft_model
        try:
            if draft is None:
                raise Declined("there is no draft model")
            if layout.caches != "classes" or self._encoder is not None:
                raise Declined("only text models with full attention in all layers can skip tokens")
            self._scorer, found, note = spec_prefill(
                *(settings, self._model, draft.model),
                vocab_size=facts.vocab_size,
                packing=layout.packing,
                measure=facts.calibration is not None,
            )
        except Declined as reason:
            return dataclasses.replace(facts, notes=(*facts.notes, f"no SpecPrefill: {reason}"))
        return dataclasses.replace(facts, notes=(*facts.notes, note), spec_prefill=found)

    def _calibrate(self, facts: GenerationFacts) -> GenerationFacts:
        """The facts with what chunks, steps and saves cost here, measured after the warm-up has compiled kernels."""
        if "calibration" in self._settings.disabled or self._weight_bytes < MIN_WEIGHT_BYTES:
            return facts
        started = time.monotonic()
        speculating = self._speculating
        if facts.drafters:
            self._speculating = Speculating(Drafts((AnyTokens(), *speculating.drafts.drafters)))
        measured = calibrate(self, facts, available_bytes=lambda: available_bytes(self._device))
        self._speculating = speculating
        log.debug("Calibrated in %.1f s", time.monotonic() - started)
        facts = dataclasses.replace(facts, calibration=measured)
        return dataclasses.replace(facts, workspace_bytes=workspace_bytes(facts))
