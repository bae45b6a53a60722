"""Decides at load how a model runs on its device: the form of its layers, its KV cache, and which fast paths it gets.

A fast path is used where it fits the model and the device, and where a trial of two rows gives the right answer. The
result, a `Layout`, is plain data; `assembly` makes a batch and a prefiller from it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from millstream.backend.device import Device
from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.caches.slots import fits_slots
from millstream.backend.generation.layers.narrow_rope import use_narrow_rope
from millstream.backend.generation.layers.state_layers import adopt_state_layers
from millstream.backend.generation.layers.step_rope import use_step_rope
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.layout_choice.agreement import AGREED, ERRORS, Trial, disagreement
from millstream.backend.generation.layout_choice.arena import arena_layout
from millstream.backend.generation.layout_choice.plain_cache import PlainCache
from millstream.backend.generation.layout_choice.prompt_passes import PromptPasses
from millstream.backend.generation.layout_choice.quantised_cache import quantised_cache
from millstream.backend.generation.layout_choice.subject import Subject
from millstream.backend.generation.settings import GenerationSettings
from millstream.backend.layers.cpu_attention import cpu_attention
from millstream.backend.layers.cpu_linear import mkl_layer, mkl_layout_pays, use_mkl_layout
from millstream.backend.layers.depthwise_conv import replace_depthwise
from millstream.backend.layers.grouped_attention import grouped_attention
from millstream.backend.layers.patch_layers import patch_function
from millstream.backend.layers.projections import fuse_projections
from millstream.backend.layers.recurrent_prompts import read_in_pieces, tell_lengths

KERNEL_SHARE, MLX_SHARE = (512, 256), (1024, 2)
"""How many tokens are worth sharing, and in how many pieces at most."""


class LayoutChooser:
    """Owner only. Decides once per load: first `shape_layers`, then, with all weights evaluated, `choose`."""

    def __init__(self, settings: GenerationSettings, device: Device, model: Any, *, takes_media: bool) -> None:
        self._subject = Subject(settings, device, model, takes_media)
        self._paths = self._subject.paths

    def shape_layers(self) -> None:
        """Put the layers into the form that runs fastest on this device. Call it before they are evaluated."""
        subject, paths = self._subject, self._paths
        model, device = subject.model, subject.device
        tell_lengths(model)
        if device.kind != "metal":  # where mlx-lm has kernels for them
            read_in_pieces(model)
        if not device.is_cpu:
            paths.decline("mkl-layout", "for the CPU")
        elif not mkl_layout_pays():
            paths.decline("mkl-layout", "not x86_64")
        mkl = paths.enabled("mkl-layout")
        if paths.enabled("fuse") and not fuse_projections(model, mkl_layer if mkl else lambda layer: layer):
            paths.decline("fuse", "no layers that read the same input")
        if device.kind != "metal":  # where MLX has a kernel for them
            replace_depthwise(model)
        if device.kind == "cuda" or (subject.settings.like_gpu and device.is_cpu):
            subject.attention = grouped_attention
            patch_function(model, "scaled_dot_product_attention", grouped_attention)
        if device.kind == "cuda":
            use_narrow_rope(model)
        elif device.is_cpu and not subject.settings.like_gpu:
            use_step_rope(model)
        if mkl:
            use_mkl_layout(model)
            if not subject.settings.like_gpu:
                subject.attention = cpu_attention
                patch_function(model, "scaled_dot_product_attention", cpu_attention)

    def choose(self, trial: Trial) -> Layout:
        """The layout, by trials of two rows."""
        self._paths.decline_by_device()
        subject, passes = self._subject, PromptPasses(self._subject, trial)
        state_trouble = None
        if subject.settings.layout != "auto" and (arena := self._in_arenas(trial)) is not None:
            return arena
        if subject.settings.kv_bits:
            layout = quantised_cache(subject, trial)
        else:
            plain = PlainCache(subject, trial, passes)
            layout, state_trouble = plain.choose(), plain.state_trouble
            if layout.one_row_reason is not None and (arena := self._in_arenas(trial)) is not None:
                return arena
        if layout.caches == "merged":
            layout = dataclasses.replace(layout, width=None, in_place=False, group_fill=None, padded_chunks=False)
            self._paths.decline("group-prefill", "needs slots")
        elif layout.caches == "classes" and layout.packing is None:
            layout = self._with_shared_prefixes(layout)
        subject.fusion.explain_packed_layers()
        layout = passes.continuing(passes.flat(self._with_compiled_step(layout, trial)))
        no_drafts = self._no_drafts(layout, state_trouble, trial)
        return dataclasses.replace(layout, reasons=self._paths.reasons, notes=subject.fusion.notes, no_drafts=no_drafts)

    def _in_arenas(self, trial: Trial) -> Layout | None:
        if (arena := arena_layout(self._subject, trial)) is None:
            return None
        no_drafts = self._no_drafts(arena, adopt_state_layers(self._subject.model), trial)
        return dataclasses.replace(arena, reasons=self._paths.reasons, no_drafts=no_drafts)

    def _with_shared_prefixes(self, layout: Layout) -> Layout:
        tokens, runs = KERNEL_SHARE if layout.in_place else MLX_SHARE
        wanted = self._subject.settings.share_tokens
        return dataclasses.replace(layout, share_tokens=tokens if wanted is None else wanted, share_runs=runs)

    def _with_compiled_step(self, layout: Layout, trial: Trial) -> Layout:
        """Decode steps as compiled functions, if a trial of them gives the same answers."""
        if layout.one_row_reason is not None:
            self._paths.decline("compiled-step", "one row at a time")
        if not self._paths.enabled("compiled-step"):
            return layout
        compiled = dataclasses.replace(layout, compiled_step=True)
        if trouble := disagreement(trial, compiled, layout):
            self._paths.decline("compiled-step", trouble)
            return layout
        return compiled

    def _no_drafts(self, layout: Layout, state_trouble: str | None, trial: Trial) -> str | None:
        """Why rows cannot verify drafts; None if they can."""
        if layout.caches == "slots":
            return "its KV caches take one token per row and step"
        if layout.caches == "arena" and state_trouble is not None:
            return state_trouble
        if layout.caches == "merged":
            plain = fits_slots(new_row_caches(self._subject.model))
            return None if plain else "its KV caches cannot forget tokens that a row does not keep"
        if state_trouble is not None:
            return state_trouble
        try:
            # A model may answer by the chunks of its prompt (PLaMo 3): then a pass is compared with steps.
            if trial.verification(layout) <= AGREED or trial.verification(layout, one_by_one=True) <= AGREED:
                return None
        except ERRORS as error:
            return f"a pass of several tokens per row fails ({str(error) or type(error).__name__})"
        return "a pass of several tokens per row gives other answers than steps of one"
