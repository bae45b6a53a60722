"""Has a model that was just loaded run for the first time, and measures what that costs: the second half of a load.

Unlike `load`, this drives the backend with plans, as a scheduler does. Each part leaves it without rows.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time

from millstream.backend.device import Device, available_bytes
from millstream.backend.generation.bursts import BURST_CONTEXT, BURST_PREFIX_CACHE, run_bursts
from millstream.backend.generation.calibration import MIN_WEIGHT_BYTES, calibrate
from millstream.backend.generation.drafters.any_tokens import AnyTokens
from millstream.backend.generation.drafters.drafts import Drafts
from millstream.backend.generation.load import Loaded
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prompt_warmup import WarmRoom, warm_up_prompts
from millstream.backend.generation.settings import GenerationSettings
from millstream.backend.generation.spec_prefill.scorer import PromptScorer
from millstream.backend.generation.spec_prefill.spec_prefill import Declined, SpecPrefillSettings, spec_prefill
from millstream.backend.generation.speculating import Speculating
from millstream.backend.generation.warmup import WarmupProgress, warm_up, warm_up_passes
from millstream.backend.kernels.compiled import rehearse
from millstream.backend.phases import LoadPhases
from millstream.engine.generation.cost_model import workspace_bytes
from millstream.engine.generation.plan import GenerationBackend
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.model_facts import GenerationFacts

MOST_WARM_TOKENS = 4096
"""Prompts that share a pass have at most so many tokens together in the warm-up."""

log = logging.getLogger(__name__)


def compiles_kernels(settings: GenerationSettings, device: Device) -> bool:
    """The CPU has none to compile."""
    return not device.is_cpu and "warmup" not in settings.disabled


def warm_up_model(
    backend: GenerationBackend, loaded: Loaded, device: Device, until_now: LoadPhases, progress: WarmupProgress
) -> None:
    """Compile kernels before the first request. `until_now`: the phases of the load."""
    facts = loaded.facts
    phases = LoadPhases()

    def after_run(name: str) -> None:
        phases.done(name)
        progress.advance()

    room = WarmRoom(lambda: available_bytes(device))
    most = min(MOST_WARM_TOKENS, facts.context_length)
    warm_up_prompts(loaded.assembly, loaded.layout, most, facts.max_rows, room)
    phases.done("prompts")
    run = functools.partial(
        warm_up,
        backend,
        max_rows=facts.max_rows,
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        passes=functools.partial(_warm_up_passes, backend, loaded) if facts.drafters else lambda: None,
    )
    if until_now.has_compiled:
        # Not all kernels were on disk: those that are still missing compile at once.
        rehearse(run)
        backend.reset()
        phases.done("rehearsal")
    run(after_run=after_run)
    log.info("Warmed up in %.1f s", sum(seconds for _, seconds in phases.phases))
    log.debug("Warm-up: %s", phases)
    if (drafter := loaded.drafting.model_drafter) is not None:
        drafter.warm_up()


def _warm_up_passes(backend: GenerationBackend, loaded: Loaded) -> None:
    facts, assembly = loaded.facts, loaded.assembly
    warm_up_passes(
        lambda: assembly.make(loaded.layout, PrefixStore()), max_rows=facts.max_rows, vocab_size=facts.vocab_size
    )
    backend.reset()
    if assembly.mtp is not None:
        assembly.mtp.warm_up()


def calibrated(
    backend: GenerationBackend,
    facts: GenerationFacts,
    speculating: Speculating,
    device: Device,
    settings: GenerationSettings,
) -> GenerationFacts:
    """The facts with what chunks, steps and saves cost here, measured after the warm-up has compiled kernels.
    `speculating`: the backend's."""
    if "calibration" in settings.disabled or facts.weight_bytes < MIN_WEIGHT_BYTES:
        return facts
    started = time.monotonic()
    drafts = speculating.drafts
    if facts.drafters:
        speculating.drafts = Drafts((AnyTokens(), *drafts.drafters))
    measured = calibrate(backend, facts, available_bytes=lambda: available_bytes(device))
    speculating.drafts = drafts
    log.debug("Calibrated in %.1f s", time.monotonic() - started)
    facts = dataclasses.replace(facts, calibration=measured)
    return dataclasses.replace(facts, workspace_bytes=workspace_bytes(facts))


def with_spec_prefill(
    facts: GenerationFacts, loaded: Loaded, settings: SpecPrefillSettings | None
) -> tuple[GenerationFacts, PromptScorer | None]:
    """The facts with how long prompts are read in part, and what scores them; or with a note that says why not."""
    if settings is None:
        return facts, None
    layout, draft = loaded.layout, loaded.drafting.draft_model
    try:
        if draft is None:
            raise Declined("there is no draft model")
        if layout.caches != "classes" or loaded.encoder is not None:
            raise Declined("only text models with full attention in all layers can skip tokens")
        scorer, found, note = spec_prefill(
            *(settings, loaded.assembly.model, draft.model),
            vocab_size=facts.vocab_size,
            packing=layout.packing,
            measure=facts.calibration is not None,
        )
    except Declined as reason:
        return dataclasses.replace(facts, notes=(*facts.notes, f"no SpecPrefill: {reason}")), None
    return dataclasses.replace(facts, notes=(*facts.notes, note), spec_prefill=found), scorer


def start_streams(backend: GenerationBackend, facts: GenerationFacts) -> None:
    """Have streams start together, if the scheduler that plans them can be like the engine's."""
    if facts.calibration is None or facts.context_length < BURST_CONTEXT:
        return
    plain = dataclasses.replace(facts, drafters=(), spec_prefill=None)
    scheduler = make_scheduler(SchedulerSettings(prefix_cache_bytes=BURST_PREFIX_CACHE), plain)
    done = run_bursts(backend, scheduler, rows=facts.max_rows, vocab_size=facts.vocab_size)
    log.debug("%d bursts came to their end", done)
