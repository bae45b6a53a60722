"""The KV cache of a model and the attention over it: the best that the model takes, found by trying."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Literal

from millstream.backend.generation.caches.batch_caches import RowCaches, new_row_caches, unbatchable
from millstream.backend.generation.caches.mixed_caches import mixed_misfit
from millstream.backend.generation.caches.slots import fits_slots
from millstream.backend.generation.caches.widths import exact, kernel_width
from millstream.backend.generation.layers.attention import adopt_attention, kernel_attention
from millstream.backend.generation.layers.capped_layers import capped_layers
from millstream.backend.generation.layers.shared_layers import with_shared_layers
from millstream.backend.generation.layers.slab_attention import Attention, slab_attention
from millstream.backend.generation.layers.state_layers import adopt_state_layers
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.layout_choice.agreement import AGREED, Trial, disagreement, trouble_of
from millstream.backend.generation.layout_choice.prompt_passes import PromptPasses
from millstream.backend.generation.layout_choice.subject import Subject
from millstream.backend.generation.prefix_store.cache_state import leaf_caches
from millstream.backend.layers.patch_layers import callers_of

log = logging.getLogger(__name__)


class PlainCache:
    """Owner only."""

    def __init__(self, subject: Subject, trial: Trial, passes: PromptPasses) -> None:
        self._subject = subject
        self._model = subject.model
        self._paths = subject.paths
        self._trial = trial
        self._passes = passes
        self.state_trouble: str | None = None
        """Why layers with states cannot have several tokens per row in a pass."""

    def choose(self) -> Layout:
        """Length classes where layers have full attention, mlx-lm's caches elsewhere; one row at a time if a model
        cannot run two."""
        caches = new_row_caches(self._model)
        layout = self._subject.draft()
        if (kind := unbatchable(caches)) is not None:
            self._paths.decline("slots", f"{kind} cannot be batched")
            return dataclasses.replace(layout, caches="merged", one_row_reason=f"{kind} cannot be batched")
        if not fits_slots(caches) and self._paths.enabled("slots"):
            if (mixed := self._mixed(layout, caches)) is not None:
                return mixed
            layout = dataclasses.replace(layout, caches="merged")
        layout = self._adopt_attention(layout, caches)
        layout, trouble = self._settle(layout, caches)
        if trouble is None:
            return layout
        log.warning("This model cannot run two rows at once: %s", trouble)
        self._paths.decline("slots", trouble)
        return dataclasses.replace(layout, caches="merged", one_row_reason=f"this model cannot be batched ({trouble})")

    @property
    def _slab_attention(self) -> Attention:
        return kernel_attention if self._paths.on_cuda else slab_attention(self._subject.attention)

    def _mixed(self, layout: Layout, caches: RowCaches) -> Layout | None:
        """Length classes for those layers that have full attention; None, with the reason told, if that cannot be."""
        merged = dataclasses.replace(layout, caches="merged", slot_policy=exact, group_fill=None, padded_chunks=False)
        wanted, trial = layout, self._trial
        layout = dataclasses.replace(merged, caches="mixed", slot_policy=wanted.slot_policy)
        trouble = mixed_misfit(self._model, caches)
        if trouble is None:
            self.state_trouble = adopt_state_layers(self._model)
            attend = with_shared_layers(self._slab_attention)
            adopt_attention(self._model, attend)
            fused = self._subject.fusion.fuse(attend) is not None
            layout = dataclasses.replace(layout, width=kernel_width if fused else None)
            if self._paths.kernels_write:
                layout = dataclasses.replace(layout, in_place=True, attention="kernels")
            trouble = disagreement(trial, layout, merged)
        if trouble and self._subject.fusion.undo(trouble):
            layout = dataclasses.replace(layout, width=None)
            trouble = disagreement(trial, layout, merged)
        if trouble and layout.in_place:
            log.info("This model decodes without kernels: %s", trouble)
            layout = self._subject.without_kernels(layout)
            trouble = disagreement(trial, layout, merged)
        if trouble is None:
            return self._passes.padded(layout, wanted)
        log.info("This model decodes without length classes: %s", trouble)
        kind = next(type(cache).__name__ for cache in caches if not fits_slots([cache]))
        self._paths.decline("slots", f"{kind} is not full attention, and {trouble}")
        return None

    def _adopt_attention(self, layout: Layout, caches: RowCaches) -> Layout:
        """Have the layers call our attention over slabs; on CUDA, or where tests want it, also fuse their blocks."""
        attend, paths = self._slab_attention, self._paths
        adopted = adopt_attention(self._model, attend) if layout.caches == "slots" else 0
        fused = self._subject.fusion.fuse(attend)
        if layout.caches != "slots" or len(caches) not in (adopted, 0 if fused is None else fused.attending):
            return layout
        layout = dataclasses.replace(layout, caches="classes")
        if not paths.wide:
            return layout
        return dataclasses.replace(
            layout,
            attention="kernels" if paths.on_cuda else layout.attention,
            width=kernel_width if fused is not None else None,
            in_place=paths.kernels_write,
        )

    def _settle(self, layout: Layout, caches: RowCaches) -> tuple[Layout, str | None]:
        """Find a layout in which rows run together as they run alone; what is wrong with the last one, if none is
        right."""
        plain = dataclasses.replace(layout, caches="merged", width=None, in_place=False, group_fill=None)
        # On a GPU answers are compared as well: our kernels write and read what MLX does not see.
        compare = functools.partial(disagreement, other=plain) if self._paths.as_on_gpu else trouble_of
        wrong = functools.partial(compare, self._trial)
        trouble = wrong(layout)
        attending = sum(hasattr(leaf, "keys") for leaf in leaf_caches(caches))
        calling = len(callers_of(self._model, "scaled_dot_product_attention")) + capped_layers(self._model)
        own = calling < attending
        if trouble and self._subject.fusion.undo(trouble):
            layout = dataclasses.replace(layout, width=None)
            if own and layout.caches == "classes":
                layout = dataclasses.replace(self._subject.without_kernels(layout), caches="slots")
            trouble = wrong(layout)
        while trouble and layout.caches == "classes":
            log.info("This model decodes without %s: %s", "kernels" if layout.in_place else "length classes", trouble)
            next_best: Literal["classes", "slots"] = "classes" if layout.in_place else "slots"
            layout = dataclasses.replace(self._subject.without_kernels(layout), caches=next_best)
            trouble = wrong(layout)
        return self._with_own_attention(layout) if own else (layout, trouble)

    def _with_own_attention(self, layout: Layout) -> tuple[Layout, str | None]:
        """The model has attention of its own, in which a mask may mean something else (Gemma 2 has scores of five
        dimensions): answers would be wrong without any error. Fused blocks do not use it, but prompts do."""
        trouble = None
        if layout.caches == "classes":
            self._paths.decline("group-prefill", "its layers have attention of their own")
            layout = dataclasses.replace(layout, group_fill=None)
        for dims in (4, 5) if layout.caches == "slots" else (4,):
            layout = dataclasses.replace(layout, mask_dims=dims)
            if dims != 4:
                layout = dataclasses.replace(layout, group_fill=None)
            trouble = trouble_of(self._trial, layout)
            if not trouble and self._trial.disagreement(layout) <= AGREED:
                if dims != 4:
                    self._paths.decline("group-prefill", f"its masks have {dims} dimensions")
                return layout, None
        return layout, trouble or "its rows answer differently together than alone"
