"""Which passes prompts share: padded or flat, and those that continue a cached prefix."""

from __future__ import annotations

import dataclasses
import logging

from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.caches.flat_caches import fits_flat_pass
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.layout_choice.agreement import ERRORS, Trial, rounding_limit, trouble_of
from millstream.backend.generation.layout_choice.subject import Subject
from millstream.backend.generation.prefix_store.cache_state import leaf_caches

log = logging.getLogger(__name__)

CONTINUING_CACHES = (KVCache, RotatingKVCache, ArraysCache)
"""What a cached prefix can be put into for several rows at once."""


class PromptPasses:
    """Owner only. Each is used if a trial of it gives the answers of prompts alone."""

    def __init__(self, subject: Subject, trial: Trial) -> None:
        self._model = subject.model
        self._paths = subject.paths
        self._takes_media = subject.takes_media
        self._trial = trial

    def padded(self, layout: Layout, wanted: Layout) -> Layout:
        """With padded chunks and groups of prompts as `wanted`, if padding changes no answer: a layer may carry it on
        in its state."""
        trial = self._trial
        padded = dataclasses.replace(layout, padded_chunks=wanted.padded_chunks)
        if wanted.padded_chunks and trouble_of(trial, padded) is None:
            limit = rounding_limit(self._model, trial, layout)
            layout = padded if trial.disagreement(padded, together=True) <= limit else layout
        if wanted.group_fill is None:
            return layout
        grouped = dataclasses.replace(layout, group_fill=wanted.group_fill)
        try:
            agree = self._agree(layout, grouped)
        except ERRORS as error:
            self._paths.decline("group-prefill", str(error) or type(error).__name__)
            return layout
        if agree:
            return grouped
        self._paths.decline("group-prefill", "its prompts answer differently together than alone")
        return layout

    def flat(self, layout: Layout) -> Layout:
        """With whole prompts one after the other in a pass, if that gives the same answers as padding."""
        fits = layout.caches in ("classes", "mixed") and all(map(fits_flat_pass, new_row_caches(self._model)))
        if not fits or layout.group_fill is None or self._takes_media or not self._paths.wide:
            return layout
        flat = dataclasses.replace(layout, flat_prompts=True)
        try:
            return flat if self._agree(layout, flat) else layout
        except ERRORS as error:
            log.info("This model pads prompts that share a pass: %s", error)
            return layout

    def continuing(self, layout: Layout) -> Layout:
        """With one pass for prompts that continue the same cached prefix."""
        leaves = leaf_caches(new_row_caches(self._model))
        fits = layout.caches in ("classes", "mixed") and all(type(leaf) in CONTINUING_CACHES for leaf in leaves)
        if not fits or layout.group_fill is None or layout.packing is not None or self._takes_media:
            return layout
        continuing = dataclasses.replace(layout, continues=True)
        try:
            limit = rounding_limit(self._model, self._trial, layout)
            return continuing if self._trial.continuation(continuing) <= limit else layout
        except ERRORS as error:
            log.info("Prompts of this model that continue a cached prefix do not share a pass: %s", error)
            return layout

    def _agree(self, layout: Layout, other: Layout) -> bool:
        """Whether prompts that share a pass answer alike in both layouts, but for rounding."""
        limit = rounding_limit(self._model, self._trial, layout)
        return self._trial.disagreement(other, together=True) <= limit
