"""A draft model: a small model with the target's vocabulary, loaded on the target's owner. Owner only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from millstream.backend.device import Device
from millstream.backend.generation.assembly import Assembly
from millstream.backend.generation.drafters.draft_rows import DraftRows
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.layout_choice.chooser import LayoutChooser
from millstream.backend.generation.prefill.prefiller import Prefiller
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.settings import GenerationSettings
from millstream.backend.generation.trial import TwoRowTrial
from millstream.backend.weights.loading import LoadedModel, load
from millstream.backend.weights.materialize import evaluate_all
from millstream.backend.weights.unpacking import StaysPacked
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import ModelError


class DraftModel:
    """Its weights and the layout that it runs in."""

    def __init__(self, name: str, loaded: LoadedModel, layout: Layout, assembly: Assembly, weight_bytes: int) -> None:
        self.model: Any = loaded.model
        self.vocab_size = loaded.vocab_size
        self.context_length = loaded.context_length
        self.weight_bytes = weight_bytes
        self.layout = layout
        self.kv_bytes_per_token, _ = assembly.measure(layout)
        self.note = f"draft model: {name}, {loaded.dtype} weights, {weight_bytes / 2**30:.2f} GiB"
        self._assembly = assembly

    def make(self) -> tuple[DraftRows, Prefiller]:
        """Caches without rows, and the prefiller whose rows they take."""
        forward, caches, compiled, prefiller = self._assembly.make_draft(self.layout, PrefixStore())
        return DraftRows(forward, caches, compiled), prefiller


def load_draft_model(
    target: GenerationSettings, device: Device, keep_packed: StaysPacked, report: Progress = ignore_progress
) -> DraftModel:
    """Load the draft model of a target's settings. Raises `ModelError` if it cannot be one."""
    assert target.draft is not None, "there is no draft model"
    settings = replace(
        target, kind=target.draft.kind, path=target.draft.path, kv_bits=0, grammars=None, draft=None, share_tokens=0
    )
    loaded = load(settings.kind, settings.path, device, unpack=settings.unpack, keep_packed=keep_packed, report=report)
    if loaded.is_vision:
        raise _unfit(target, "it takes images: a draft model must be a text model")
    chooser = LayoutChooser(settings, device, loaded.model, takes_media=False)
    chooser.shape_layers()
    weight_bytes = evaluate_all(loaded.model)
    assembly = Assembly(loaded.model, loaded.vocab_size)
    layout = chooser.choose(TwoRowTrial(assembly))
    if layout.caches != "classes":
        raise _unfit(target, "a draft model must have full attention in all layers, and layers that rows can share")
    return DraftModel(settings.path.name, loaded, layout, assembly, weight_bytes)


def _unfit(settings: GenerationSettings, reason: str) -> ModelError:
    assert settings.draft is not None
    return ModelError(f"{settings.draft.path} cannot be the draft model: {reason}.")
