"""Loads a model: its weights, the form of its layers, the layout that it runs in, and what drafts for it.

None of this runs plans: the backend takes over what comes of it, and `preparation` has it run for the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millstream.backend.device import Device, free_bytes
from millstream.backend.generation.assembly import Assembly
from millstream.backend.generation.drafters.choice import Drafting, Matcher, choose_drafters
from millstream.backend.generation.drafters.draft_model import DraftModel, load_draft_model
from millstream.backend.generation.drafters.drafter import Drafter
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.layout_choice.chooser import LayoutChooser
from millstream.backend.generation.mtp.attach import AttachedMtp, attach_mtp
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.settings import GenerationSettings
from millstream.backend.generation.trial import TwoRowTrial
from millstream.backend.generation.warmup import WarmupProgress
from millstream.backend.kernels.small_matmul import supported_here
from millstream.backend.phases import LoadPhases
from millstream.backend.weights.identity import identity_of
from millstream.backend.weights.loading import LoadedModel, load
from millstream.backend.weights.materialize import evaluate_all
from millstream.backend.weights.unpacking import StaysPacked, kernels_take, nothing_packed
from millstream.engine.protocols import Progress
from millstream.model_facts import GenerationFacts, PrefixSizes

if TYPE_CHECKING:
    from millstream.backend.generation.media.encoder import MediaEncoder


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can run plans, and what runs beside it."""

    facts: GenerationFacts
    """As far as they are known before plans have run."""
    assembly: Assembly
    layout: Layout
    encoder: MediaEncoder | None
    drafting: Drafting


@dataclass(slots=True)
class _Parts:
    """What a load has made so far, and the memory that it takes."""

    weights: LoadedModel
    assembly: Assembly
    layout: Layout
    encoder: MediaEncoder | None
    mtp: AttachedMtp
    weight_bytes: int
    token_bytes: int
    prefix_sizes: PrefixSizes | None


class ModelLoader:
    """Owner only. One load of a model."""

    def __init__(
        self,
        settings: GenerationSettings,
        device: Device,
        *,
        drafters: Sequence[Drafter] | None,
        matcher: Matcher,
        phases: LoadPhases,
        report: Progress,
    ) -> None:
        """`drafters`: None for those that the settings and the model bring. `matcher`: of the rows that will run."""
        self._settings = settings
        self._device = device
        self._drafters = drafters
        self._matcher = matcher
        self._phases = phases
        self._report = report

    def read_weights(self) -> LoadedModel:
        settings = self._settings
        weights = load(
            settings.kind,
            settings.path,
            self._device,
            unpack=settings.unpack,
            keep_packed=self._packed_layers,
            report=self._report,
        )
        self._phases.done("weights")
        return weights

    def load(self, weights: LoadedModel, progress: WarmupProgress, device_name: str) -> Loaded:
        """Choose how these weights run, and what drafts for them. `device_name`: for the facts."""
        parts = self._shape(weights, progress)
        draft_model = self._load_draft_model(parts)
        drafting = choose_drafters(
            self._settings,
            given=self._drafters,
            refused=_refuse_drafts(parts),
            draft_model=draft_model,
            mtp=parts.assembly.mtp,
            matcher=self._matcher,
            vocab_size=weights.vocab_size,
        )
        self._phases.done("memory")
        progress.advance()
        facts = self._facts(parts, drafting, device_name)
        return Loaded(facts, parts.assembly, parts.layout, parts.encoder, drafting)

    def _shape(self, weights: LoadedModel, progress: WarmupProgress) -> _Parts:
        """Give the layers their form, and try which layout they can run in."""
        settings = self._settings
        model, encoder = self._language_part(weights)
        mtp = self._attach_mtp(model, weights.config)
        chooser = LayoutChooser(settings, self._device, model, takes_media=encoder is not None)
        chooser.shape_layers()
        weight_bytes = evaluate_all(model) + mtp.weight_bytes
        self._phases.done("layers")
        progress.advance()
        assembly = Assembly(model, weights.vocab_size, encoder=encoder, grammars=settings.grammars, mtp=mtp.drafter)
        layout = chooser.choose(TwoRowTrial(assembly))
        self._phases.done("layout")
        progress.advance()
        return _Parts(weights, assembly, layout, encoder, mtp, weight_bytes, *assembly.measure(layout))

    def _language_part(self, weights: LoadedModel) -> tuple[Any, MediaEncoder | None]:
        if not weights.is_vision:
            return weights.model, None
        # Imported here, since mlx-vlm may not be installed.
        from millstream.backend.generation.media.encoder import MediaEncoder
        from millstream.backend.generation.media.language_parts import language_part

        model = language_part(weights.model)
        return model, MediaEncoder(model, self._settings.feature_bytes)

    def _attach_mtp(self, model: Any, config: dict[str, Any]) -> AttachedMtp:
        """Load the model's head, if its folder has one."""
        settings = self._settings
        if settings.kind != "folder" or self._drafters is not None or not settings.speculation:
            return AttachedMtp()
        if settings.draft is not None:
            return AttachedMtp(note="MTP weights are not used: the draft model drafts")
        return attach_mtp(settings.path, config, model, self._device, unpack=settings.unpack)

    def _load_draft_model(self, parts: _Parts) -> DraftModel | None:
        if self._settings.draft is None:
            return None
        draft = load_draft_model(self._settings, self._device, self._packed_layers, self._report)
        parts.weight_bytes += draft.weight_bytes
        parts.token_bytes += draft.kv_bytes_per_token
        self._phases.done("draft model")
        return draft

    def _facts(self, parts: _Parts, drafting: Drafting, device_name: str) -> GenerationFacts:
        settings, weights, layout, encoder = self._settings, parts.weights, parts.layout, parts.encoder
        return GenerationFacts(
            context_length=weights.context_length,
            vocab_size=weights.vocab_size,
            max_rows=settings.max_rows if layout.one_row_reason is None else 1,
            weight_bytes=parts.weight_bytes,
            dtype=weights.dtype,
            device=device_name,
            notes=_notes(parts, drafting),
            prefix_sizes=parts.prefix_sizes,
            kv_bytes_per_token=parts.token_bytes,
            identity=identity_of(settings.path, weights.dtype, self._device.kind, settings.unpack, settings.kv_bits),
            media=encoder.kinds if encoder else (),
            whole_media=encoder is not None and parts.assembly.model.whole_media,
            share_tokens=layout.share_tokens,
            shares_passes=layout.caches == "arena" and layout.one_row_reason is None,
            kv_layout="classes" if layout.caches in ("classes", "mixed") else "rectangle",
            device_memory=parts.weight_bytes + max(0, free_bytes(self._device)),
            feature_bytes=settings.feature_bytes if encoder is not None else 0,
            drafters=drafting.drafts.names,
            exact_passes=layout.exact_passes,
        )

    @property
    def _packed_layers(self) -> StaysPacked:
        return kernels_take if self._keeps_packed else nothing_packed

    @property
    def _keeps_packed(self) -> bool:
        """True if our kernels compute with quantised weights as they are."""
        if self._device.kind != "cuda" or not supported_here() or self._settings.layout != "auto":
            return False
        return self._settings.disabled.isdisjoint({"kernel", "fused-matmul", "packed-matmul"})


def _refuse_drafts(parts: _Parts) -> str | None:
    """Why the model cannot verify drafts; None if it can. Then its head is of no use: dropped, with its weights."""
    batch, _ = parts.assembly.make(parts.layout, PrefixStore())
    reason = parts.layout.no_drafts or batch.no_drafts
    if reason is not None and parts.assembly.mtp is not None:
        parts.weight_bytes -= parts.assembly.mtp.detach()
        parts.assembly.mtp = None
    return reason


def _notes(parts: _Parts, drafting: Drafting) -> tuple[str, ...]:
    layout, mtp = parts.layout, parts.mtp
    notes = [*parts.weights.notes, layout.fast_paths, *layout.notes]
    if layout.one_row_reason is not None:
        notes.append(f"one request at a time: {layout.one_row_reason}")
    if (packing := layout.packing) is not None:
        notes.append(f"KV cache quantised to {packing.bits} bits in groups of {packing.group_size}")
    notes += drafting.notes
    if mtp.note and parts.assembly.mtp is mtp.drafter:
        notes.append(mtp.note)
    return tuple(notes)
