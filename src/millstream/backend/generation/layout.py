"""Decides at load how a model runs on its device: the form of its layers, its KV cache, and which fast paths it gets.

A fast path is used where it fits the model and the device, and where a trial of two rows gives the right answer. The
result, a `Layout`, is plain data; `assembly` makes a batch and a prefiller from it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from millstream.backend.device import Device
from millstream.backend.generation.caches.batch_caches import RowCaches, new_row_caches, unbatchable
from millstream.backend.generation.caches.flat_caches import fits_flat_pass
from millstream.backend.generation.caches.mixed_caches import mixed_misfit
from millstream.backend.generation.caches.quantized import KvQuantization, choose_quantization, unsupported
from millstream.backend.generation.caches.slots import fits_slots
from millstream.backend.generation.caches.widths import SlotPolicy, cublas_width, exact, kernel_width, powers_of_two
from millstream.backend.generation.layers.attention import adopt_attention, kernel_attention
from millstream.backend.generation.layers.capped_layers import capped_layers
from millstream.backend.generation.layers.fused_blocks import Fusion, fuse_blocks, unfuse_blocks
from millstream.backend.generation.layers.narrow_rope import use_narrow_rope
from millstream.backend.generation.layers.packed_attention import packed_attention, packed_matmuls_fit
from millstream.backend.generation.layers.shared_layers import with_shared_layers
from millstream.backend.generation.layers.slab_attention import Attention, slab_attention
from millstream.backend.generation.layers.state_layers import adopt_state_layers
from millstream.backend.generation.prefix_store.cache_state import leaf_caches
from millstream.backend.generation.sampling.kernel_check import kernel_agrees
from millstream.backend.generation.settings import GenerationSettings
from millstream.backend.kernels.matmul_tuning import exact_passes, expect_rows
from millstream.backend.kernels.small_matmul import supported_here
from millstream.backend.layers.cpu_attention import cpu_attention
from millstream.backend.layers.cpu_linear import mkl_layer, mkl_layout_pays, use_mkl_layout
from millstream.backend.layers.depthwise_conv import replace_depthwise
from millstream.backend.layers.fused_matmul import BY_KERNELS, BY_MLX
from millstream.backend.layers.packed_products import measure_packed_products, packed_layers
from millstream.backend.layers.patch_layers import callers_of, patch_function
from millstream.backend.layers.projections import fuse_projections
from millstream.config import FAST_PATHS

log = logging.getLogger(__name__)

AGREED = 0.1
"""How far the logits of rows together may be from those of each alone, relative to their size. Rounding is far below,
and a mask that the model does not understand far above."""

EXACT = 1e-4
"""The same in single precision, beyond what rows differ without padding."""

UNRELATED = 0.5
"""So far apart, logits may have nothing to do with each other: what differs so much by rounding alone tells nothing."""

KERNEL_SHARE, MLX_SHARE = (512, 256), (1024, 2)
"""How many tokens are worth sharing, and in how many pieces at most."""

CONTINUING_CACHES = (KVCache, RotatingKVCache, ArraysCache)
"""What a cached prefix can be put into for several rows at once."""

ERRORS = (ValueError, TypeError, RuntimeError, AttributeError)
"""What models raise if they cannot run in a layout."""

AttentionKind = Literal["mlx-lm", "cpu", "kernels", "packed"]


@dataclass(frozen=True, slots=True)
class Layout:
    """What was chosen for one model, and why."""

    caches: Literal["classes", "slots", "mixed", "merged"]
    """Length classes for full attention; slots in one rectangle if its layers have attention of their own; for models
    with sliding windows or recurrent layers, length classes, rings and states (mixed), or mlx-lm's caches for all
    layers (merged)."""
    attention: AttentionKind
    """The attention that the layers call when rows decode."""
    slot_policy: SlotPolicy = exact
    """How many numbers, or slots, to have for some rows."""
    width: SlotPolicy | None = None
    """How many rows a forward pass has for some numbers, if that is more."""
    in_place: bool = False
    """True if our kernels write to the slabs, so that MLX need not wait until the device has read them."""
    mask_dims: int = 4
    """Dimensions of the attention scores, and so of a mask."""
    packing: KvQuantization | None = None
    """The form of a quantised KV cache."""
    group_fill: float | None = None
    """How long the shortest prompt of a prefill group is at least, relative to the longest. None: no groups."""
    share_tokens: int = 0
    """Rows with at least so many tokens in the prefix cache read them there. 0: rows hold all of their tokens."""
    share_runs: int = 0
    """In how many pieces a row may do so: each is a call of attention, except with kernels."""
    flat_prompts: bool = False
    """Whole prompts share a pass without padding, one after the other."""
    continues: bool = False
    """Prompts that continue the same cached prefix share a pass."""
    padded_chunks: bool = False
    """True if chunks are padded to one of a few lengths."""
    sampling_kernel: bool = False
    compiled_step: bool = False
    """True if a step's forward pass is one compiled function, where its caches can be traced."""
    one_row_reason: str | None = None
    """Why this model runs one row at a time; None if rows share a batch."""
    no_drafts: str | None = None
    """Why this model cannot verify drafts, several tokens per row in one pass; None if it can."""
    reasons: tuple[tuple[str, str | None], ...] = ()
    """Every fast path by name, with the reason why this model does not use it; None if it does."""
    notes: tuple[str, ...] = ()
    """What else a user may want to know of the paths: which parts of the blocks are fused."""

    @property
    def exact_passes(self) -> tuple[tuple[int, int], ...]:
        """See `GenerationFacts.exact_passes`: our matmuls give a row the same numbers at all of their widths. Wider
        plain steps are computed by cuBLAS."""
        return exact_passes() if self.width is kernel_width else ()

    @property
    def fast_paths(self) -> str:
        """The fast paths in one line, for the log."""
        used = ", ".join(name for name, reason in self.reasons if reason is None) or "none"
        unused = ", ".join(f"{name} ({reason})" for name, reason in self.reasons if reason is not None)
        return f"fast paths: {used}" + (f"; not used: {unused}" if unused else "")


class Trial(Protocol):
    """Runs two rows of unequal length in a layout."""

    def two_rows(self, layout: Layout) -> None:
        """Raises what the model raises if it cannot run them."""
        ...

    def disagreement(self, layout: Layout, *, together: bool = False) -> float:
        """How far the logits of two rows together are from those of each alone, relative to their size. `together`: of
        rows whose prompts share a pass."""
        ...

    def verification(self, layout: Layout, *, one_by_one: bool = False) -> float:
        """How far the logits of passes of several tokens per row are from those of each row alone, or of the same
        tokens one by one."""
        ...

    def continuation(self, layout: Layout) -> float:
        """How far the logits of two rows that continue a cached prefix in one pass are from those of each alone."""
        ...


class LayoutChooser:
    """Owner only. Decides once per load: first `shape_layers`, then, with all weights evaluated, `choose`."""

    def __init__(self, settings: GenerationSettings, device: Device, model: Any, *, takes_media: bool) -> None:
        self._settings = settings
        self._device = device
        self._model = model
        self._takes_media = takes_media
        self._attention: Attention = scaled_dot_product_attention
        self._fusion: Fusion | None = None
        self._state_trouble: str | None = None
        """Why layers with states cannot have several tokens per row in a pass."""
        self._declined: dict[str, str] = {name: "--disable" for name in FAST_PATHS if name in settings.disabled}

    def shape_layers(self) -> None:
        """Put the layers into the form that runs fastest on this device. Call it before they are evaluated."""
        if not self._device.is_cpu:
            self._decline("mkl-layout", "for the CPU")
        elif not mkl_layout_pays():
            self._decline("mkl-layout", "not x86_64")
        mkl = self._enabled("mkl-layout")
        if self._enabled("fuse") and not fuse_projections(self._model, mkl_layer if mkl else lambda layer: layer):
            self._decline("fuse", "no layers that read the same input")
        if self._device.kind != "metal":  # where MLX has a kernel for them
            replace_depthwise(self._model)
        if self._device.kind == "cuda":
            use_narrow_rope(self._model)
        if mkl:
            use_mkl_layout(self._model)
            if not self._settings.like_gpu:
                self._attention = cpu_attention
                patch_function(self._model, "scaled_dot_product_attention", cpu_attention)

    def choose(self, trial: Trial) -> Layout:
        """Length classes where layers have full attention, mlx-lm's caches elsewhere; one row at a time if a model
        cannot run two."""
        if self._device.kind != "cuda":
            self._decline("kernel", "no CUDA")
        needs = "needs kernel" if self._device.kind == "cuda" else "no CUDA"
        if not self._on_cuda and not self._settings.like_gpu:
            self._decline("fused-matmul", needs)
        if not self.steps_compile:
            self._decline("compiled-step", needs)
        layout = self._quantised(trial) if self._settings.kv_bits else self._plain(trial)
        if layout.caches == "merged":
            layout = dataclasses.replace(layout, width=None, in_place=False, group_fill=None, padded_chunks=False)
        if layout.caches == "classes" and layout.packing is None:
            tokens, runs = KERNEL_SHARE if layout.in_place else MLX_SHARE
            layout = dataclasses.replace(
                layout,
                share_tokens=tokens if self._settings.share_tokens is None else self._settings.share_tokens,
                share_runs=runs,
            )
        if layout.caches == "merged":
            self._decline("group-prefill", "needs slots")
        self._look_at_packed_layers()
        layout = self._flatten_prompts(self._compile_step(layout, trial), trial)
        layout = self._continue_prompts(layout, trial)
        reasons = tuple((name, self._declined.get(name)) for name in FAST_PATHS)
        notes = () if self._fusion is None or not self._enabled("fused-matmul") else (self._fusion.note,)
        return dataclasses.replace(layout, reasons=reasons, notes=notes, no_drafts=self._no_drafts(layout, trial))

    def _no_drafts(self, layout: Layout, trial: Trial) -> str | None:
        """Why rows cannot verify drafts; None if they can."""
        if layout.caches == "slots":
            return "its KV caches take one token per row and step"
        if layout.caches == "merged":
            plain = fits_slots(new_row_caches(self._model))
            return None if plain else "its KV caches cannot forget tokens that a row does not keep"
        if self._state_trouble is not None:
            return self._state_trouble
        try:
            # A model may answer by the chunks of its prompt (PLaMo 3): then a pass is compared with steps.
            if trial.verification(layout) <= AGREED or trial.verification(layout, one_by_one=True) <= AGREED:
                return None
        except ERRORS as error:
            return f"a pass of several tokens per row fails ({str(error) or type(error).__name__})"
        return "a pass of several tokens per row gives other answers than steps of one"

    @property
    def kernels_write(self) -> bool:
        """True if the attention kernel writes a step's tokens and `write_rows` writes rows that join."""
        return self._on_cuda

    @property
    def steps_compile(self) -> bool:
        """True if a compiled step can be used again: what MLX's own attention reads of slabs has another shape for
        every token."""
        return self._on_cuda

    @property
    def _on_cuda(self) -> bool:
        return self._device.kind == "cuda" and self._enabled("kernel")

    @property
    def _as_on_gpu(self) -> bool:
        return self._settings.like_gpu or not self._device.is_cpu

    def _enabled(self, fast_path: str) -> bool:
        return fast_path not in self._declined

    def _decline(self, fast_path: str, reason: str) -> None:
        """Leave a fast path out. The first reason counts."""
        self._declined.setdefault(fast_path, reason)

    def _plain(self, trial: Trial) -> Layout:
        caches = new_row_caches(self._model)
        layout = self._draft(caches)
        if (kind := unbatchable(caches)) is not None:
            self._decline("slots", f"{kind} cannot be batched")
            return dataclasses.replace(layout, caches="merged", one_row_reason=f"{kind} cannot be batched")
        if not fits_slots(caches) and self._enabled("slots"):
            if (mixed := self._mixed(layout, caches, trial)) is not None:
                return mixed
            layout = dataclasses.replace(layout, caches="merged")
        layout = self._adopt_attention(layout, caches)
        layout, trouble = self._settle(layout, caches, trial)
        if trouble is None:
            return layout
        log.warning("This model cannot run two rows at once: %s", trouble)
        self._decline("slots", trouble)
        return dataclasses.replace(layout, caches="merged", one_row_reason=f"this model cannot be batched ({trouble})")

    def _draft(self, caches: RowCaches) -> Layout:
        """The layout that the caches allow, before anything is tried."""
        # Padding is computed like everything else: almost for nothing on a GPU, at full cost on the CPU.
        fill = 0.5 if self._as_on_gpu else 0.75
        return Layout(
            caches="slots" if self._enabled("slots") else "merged",
            attention="cpu" if self._attention is cpu_attention else "mlx-lm",
            slot_policy=powers_of_two if self._as_on_gpu else exact,
            group_fill=fill if self._enabled("group-prefill") else None,
            padded_chunks=(self._on_cuda or self._settings.like_gpu) and not self._takes_media,
            sampling_kernel=self._on_cuda and self._sampling_kernel_agrees,
        )

    @functools.cached_property
    def _sampling_kernel_agrees(self) -> bool:
        return kernel_agrees(self._model)

    def _mixed(self, layout: Layout, caches: RowCaches, trial: Trial) -> Layout | None:
        """Length classes for those layers that have full attention; None, with the reason told, if that cannot be."""
        merged = dataclasses.replace(layout, caches="merged", slot_policy=exact, group_fill=None, padded_chunks=False)
        wanted, wide = layout, self._on_cuda or self._settings.like_gpu
        layout = dataclasses.replace(merged, caches="mixed", slot_policy=wanted.slot_policy)
        trouble = mixed_misfit(self._model, caches)
        if trouble is None:
            self._state_trouble = adopt_state_layers(self._model)
            attend = with_shared_layers(kernel_attention if self._on_cuda else slab_attention(self._attention))
            adopt_attention(self._model, attend)
            fused = self._fuse_matmuls(attend) is not None
            layout = dataclasses.replace(layout, width=(kernel_width if fused else cublas_width) if wide else None)
            if self.kernels_write:
                layout = dataclasses.replace(layout, in_place=True, attention="kernels")
            trouble = _disagreement(trial, layout, merged)
        if trouble and self._unfuse(trouble):
            layout = dataclasses.replace(layout, width=cublas_width if wide else None)
            trouble = _disagreement(trial, layout, merged)
        if trouble and layout.in_place:
            log.info("This model decodes without kernels: %s", trouble)
            layout = dataclasses.replace(layout, in_place=False, attention=merged.attention)
            trouble = _disagreement(trial, layout, merged)
        if trouble is None:
            return self._with_padding(layout, wanted, trial)
        log.info("This model decodes without length classes: %s", trouble)
        kind = next(type(cache).__name__ for cache in caches if not fits_slots([cache]))
        self._decline("slots", f"{kind} is not full attention, and {trouble}")
        return None

    def _with_padding(self, layout: Layout, wanted: Layout, trial: Trial) -> Layout:
        """With padded chunks and groups of prompts as `wanted`, if padding changes no answer: a layer may carry it on
        in its state."""
        padded = dataclasses.replace(layout, padded_chunks=wanted.padded_chunks)
        if wanted.padded_chunks and _trouble(trial, padded) is None:
            limit = self._rounding_limit(trial, layout)
            layout = padded if trial.disagreement(padded) <= limit else layout
        if wanted.group_fill is None:
            return layout
        grouped = dataclasses.replace(layout, group_fill=wanted.group_fill)
        try:
            limit = self._rounding_limit(trial, layout, together=True)
            distance = trial.disagreement(grouped, together=True)
        except ERRORS as error:
            self._decline("group-prefill", str(error) or type(error).__name__)
            return layout
        if distance <= limit:
            return grouped
        self._decline("group-prefill", "its prompts answer differently together than alone")
        return layout

    def _rounding_limit(self, trial: Trial, layout: Layout, *, together: bool = False) -> float:
        """How far answers may be off in another layout, by how far they are in this one: deep models with large
        residuals round so much in half precision that rows differ from themselves (Gemma 3: two of three tokens).
        Rounding of half precision hides a state that carries on very little (Nemotron-H: 0.3 %)."""
        if _is_single_precision(self._model):
            return EXACT + 3 * trial.disagreement(layout)
        return min(UNRELATED, max(AGREED, 2 * trial.disagreement(layout, together=together)))

    def _adopt_attention(self, layout: Layout, caches: RowCaches) -> Layout:
        """Have the layers call our attention over slabs; on CUDA, or where tests want it, also fuse their blocks."""
        attend = kernel_attention if self._on_cuda else slab_attention(self._attention)
        adopted = adopt_attention(self._model, attend) if layout.caches == "slots" else 0
        fused = self._fuse_matmuls(attend)
        if layout.caches != "slots" or len(caches) not in (adopted, 0 if fused is None else fused.attending):
            return layout
        layout = dataclasses.replace(layout, caches="classes")
        if not (self._on_cuda or self._settings.like_gpu):
            return layout
        return dataclasses.replace(
            layout,
            attention="kernels" if self._on_cuda else layout.attention,
            width=kernel_width if fused is not None else cublas_width,
            in_place=self.kernels_write,
        )

    def _fuse_matmuls(self, attend: Attention) -> Fusion | None:
        """Off CUDA by MLX's own operations, so that the CPU can test it."""
        if self._on_cuda and not supported_here():
            self._decline("fused-matmul", "needs compute capability 8.0")
        if not self._enabled("fused-matmul"):
            return None
        if self._on_cuda:
            expect_rows(self._settings.max_rows)
        fusion = fuse_blocks(self._model, BY_KERNELS if self._on_cuda else BY_MLX, attend)
        if self._on_cuda:  # after the kernels were chosen that it compares with
            measure_packed_products(self._model)
        if not fusion:
            self._decline("fused-matmul", fusion.refused or "no layers that fit")
            return None
        self._fusion = fusion
        return fusion

    def _look_at_packed_layers(self) -> None:
        """Tell why quantised weights are not computed with as they are."""
        if not self._enabled("fused-matmul"):
            self._decline("packed-matmul", "needs fused-matmul")
        elif not packed_layers(self._model):
            self._decline("packed-matmul", "no packed weights")

    def _unfuse(self, trouble: str) -> bool:
        """Leave the blocks as mlx-lm wrote them. False if they are."""
        if not self._enabled("fused-matmul"):
            return False
        log.info("This model decodes without fused blocks: %s", trouble)
        self._decline("fused-matmul", trouble)
        return unfuse_blocks(self._model) > 0

    def _compile_step(self, layout: Layout, trial: Trial) -> Layout:
        """Decode steps as compiled functions, if a trial of them gives the same answers."""
        if layout.one_row_reason is not None:
            self._decline("compiled-step", "one row at a time")
        if not self._enabled("compiled-step"):
            return layout
        compiled = dataclasses.replace(layout, compiled_step=True)
        if trouble := _disagreement(trial, compiled, layout):
            self._decline("compiled-step", trouble)
            return layout
        return compiled

    def _flatten_prompts(self, layout: Layout, trial: Trial) -> Layout:
        """With whole prompts one after the other in a pass, if a trial of that gives the same answers as padding."""
        wide = self._on_cuda or self._settings.like_gpu
        fits = layout.caches in ("classes", "mixed") and all(map(fits_flat_pass, new_row_caches(self._model)))
        if not fits or layout.group_fill is None or self._takes_media or not wide:
            return layout
        flat = dataclasses.replace(layout, flat_prompts=True)
        try:
            limit = self._rounding_limit(trial, layout, together=True)
            distance = trial.disagreement(flat, together=True)
        except ERRORS as error:
            log.info("This model pads prompts that share a pass: %s", error)
            return layout
        return flat if distance <= limit else layout

    def _continue_prompts(self, layout: Layout, trial: Trial) -> Layout:
        """With one pass for prompts that continue the same cached prefix, if a trial of that gives the same answers."""
        leaves = leaf_caches(new_row_caches(self._model))
        fits = layout.caches in ("classes", "mixed") and all(type(leaf) in CONTINUING_CACHES for leaf in leaves)
        if not fits or layout.group_fill is None or layout.packing is not None or self._takes_media:
            return layout
        try:
            limit = self._rounding_limit(trial, layout, together=True)
            distance = trial.continuation(dataclasses.replace(layout, continues=True))
        except ERRORS as error:
            log.info("Prompts of this model that continue a cached prefix do not share a pass: %s", error)
            return layout
        return dataclasses.replace(layout, continues=distance <= limit)

    def _quantised(self, trial: Trial) -> Layout:
        """A quantised KV cache: only over slots, and with attention that reads packed numbers."""
        bits = self._settings.kv_bits
        if self._takes_media:
            raise unsupported(bits, "it takes images, and quantised keys and values are for text models")
        packing = choose_quantization(self._model, bits)
        if not self._enabled("slots"):
            raise unsupported(bits, "it needs slots, and --disable slots leaves them out")
        caches = new_row_caches(self._model)
        layout = dataclasses.replace(self._draft(caches), caches="classes", attention="packed", packing=packing)
        attend = self._packed_attention()
        if adopt_attention(self._model, attend) != len(caches):
            raise unsupported(bits, "its layers have attention of their own")
        if self._on_cuda or self._settings.like_gpu:
            width = kernel_width if self._fuse_matmuls(attend) is not None else cublas_width
            layout = dataclasses.replace(layout, width=width, in_place=self.kernels_write)
        trouble = _trouble(trial, layout)
        if trouble and layout.in_place:
            log.info("This model decodes without kernels: %s", trouble)
            layout = dataclasses.replace(layout, in_place=False)
            trouble = _trouble(trial, layout)
        if trouble and self._unfuse(trouble):
            layout = dataclasses.replace(layout, width=cublas_width)
            trouble = _trouble(trial, layout)
        if trouble:
            raise unsupported(bits, f"its attention cannot read quantised keys and values ({trouble})")
        return layout

    def _packed_attention(self) -> Attention:
        if self._on_cuda:
            return kernel_attention
        matmuls = packed_matmuls_fit(self._device.kind) and not self._settings.like_gpu
        return slab_attention(packed_attention(self._attention, matmuls=matmuls))

    def _settle(self, layout: Layout, caches: RowCaches, trial: Trial) -> tuple[Layout, str | None]:
        """Find a layout in which rows run together as they run alone; what is wrong with the last one, if none is
        right."""
        plain = dataclasses.replace(layout, caches="merged", width=None, in_place=False, group_fill=None)
        # On a GPU answers are compared as well: our kernels write and read what MLX does not see.
        compare = functools.partial(_disagreement, other=plain) if self._as_on_gpu else _trouble
        wrong = functools.partial(compare, trial)
        trouble = wrong(layout)
        attending = sum(hasattr(leaf, "keys") for leaf in leaf_caches(caches))
        calling = len(callers_of(self._model, "scaled_dot_product_attention")) + capped_layers(self._model)
        own = calling < attending
        if trouble and self._unfuse(trouble):
            layout = dataclasses.replace(layout, width=cublas_width if layout.caches == "classes" else None)
            if own and layout.caches == "classes":
                layout = dataclasses.replace(layout, caches="slots", width=None, in_place=False, attention="mlx-lm")
            trouble = wrong(layout)
        while trouble and layout.caches == "classes":
            log.info("This model decodes without %s: %s", "kernels" if layout.in_place else "length classes", trouble)
            caches_kind: Literal["classes", "slots"] = "classes" if layout.in_place else "slots"
            layout = dataclasses.replace(layout, caches=caches_kind, width=None, in_place=False, attention="mlx-lm")
            trouble = wrong(layout)
        if not own:
            return layout, trouble
        # The model has attention of its own, in which a mask may mean something else (Gemma 2 has scores of five
        # dimensions): answers would be wrong without any error. Fused blocks do not use it, but prompts do.
        if layout.caches == "classes":
            self._decline("group-prefill", "its layers have attention of their own")
            layout = dataclasses.replace(layout, group_fill=None)
        for dims in (4, 5) if layout.caches == "slots" else (4,):
            layout = dataclasses.replace(layout, mask_dims=dims)
            if dims != 4:
                layout = dataclasses.replace(layout, group_fill=None)
            trouble = _trouble(trial, layout)
            if not trouble and trial.disagreement(layout) <= AGREED:
                if dims != 4:
                    self._decline("group-prefill", f"its masks have {dims} dimensions")
                return layout, None
        return layout, trouble or "its rows answer differently together than alone"


def _is_single_precision(model: Any) -> bool:
    weights = [array for _, array in tree_flatten(model.parameters()) if mx.issubdtype(array.dtype, mx.floating)]
    return all(array.dtype == mx.float32 for array in weights)


def _trouble(trial: Trial, layout: Layout) -> str | None:
    """Why two rows cannot run in this layout: some models cannot take a batch although their caches can."""
    try:
        trial.two_rows(layout)
    except ERRORS as error:
        return str(error) or type(error).__name__
    return None


def _disagreement(trial: Trial, layout: Layout, other: Layout) -> str | None:
    """Why a layout cannot be used: two rows cannot run in it, or they answer otherwise than alone. If they do that in
    the other layout too, the layout is not the reason: PLaMo 3 answers by the chunks in which its prompt was read."""
    if (trouble := _trouble(trial, layout)) is not None:
        return trouble
    if trial.disagreement(layout) <= AGREED:
        return None
    everywhere = _trouble(trial, other) is None and trial.disagreement(other) > AGREED
    return None if everywhere else "its rows answer differently together than alone"
