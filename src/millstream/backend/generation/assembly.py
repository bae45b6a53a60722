"""Makes the batch and the prefiller that a layout describes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from millstream.backend.generation.arena.caches import ArenaCaches
from millstream.backend.generation.arena.columns import capacity_for
from millstream.backend.generation.arena.prefiller import ArenaPrefiller
from millstream.backend.generation.arena.rows import Rows
from millstream.backend.generation.batch import Batch
from millstream.backend.generation.caches.batch_caches import (
    MergedCaches,
    RowCaches,
    bytes_per_token,
    cache_arrays,
    new_row_caches,
)
from millstream.backend.generation.caches.class_caches import ClassCaches, SlabLayer
from millstream.backend.generation.caches.joining import layer_window
from millstream.backend.generation.caches.mixed_caches import MixedCaches
from millstream.backend.generation.caches.quantized import KvQuantization, QuantizedSlabLayer, new_prompt_caches
from millstream.backend.generation.caches.slabs import Parts
from millstream.backend.generation.caches.slots import SlotCaches
from millstream.backend.generation.compiled_step import CompiledStep
from millstream.backend.generation.forward_pass import ForwardPass
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.mtp.drafter import MtpDrafter
from millstream.backend.generation.prefill.continuing import ContinuingPrompts
from millstream.backend.generation.prefill.flat import FlatPasses
from millstream.backend.generation.prefill.pass_in_parts import LayersInParts, layers_in_parts
from millstream.backend.generation.prefill.prefiller import MixedPrefiller, PlainPrefiller, Prefiller, SinglePrefiller
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prefix_store.cache_state import kv_parts, prefix_sizes
from millstream.backend.generation.sampling.guides import Compiler
from millstream.errors import ModelError
from millstream.model_facts import PrefixSizes

if TYPE_CHECKING:
    from millstream.backend.generation.media.encoder import MediaEncoder

LOST_WRITES = (
    "This build of MLX hands our kernels copies of the arrays that they write to, so answers would be wrong. "
    "Start with --disable kernel, and please report it."
)


class Assembly:
    """Owner only. Builds for one model; a failed step or a trial asks for a fresh batch."""

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        *,
        encoder: MediaEncoder | None = None,
        grammars: Compiler | None = None,
        mtp: MtpDrafter | None = None,
    ) -> None:
        """`mtp`: reads the hidden states of forward passes."""
        self.model = model
        self.vocab_size = vocab_size
        self._encoder = encoder
        self._grammars = grammars
        self.mtp = mtp
        self._compiled = CompiledStep(model, None if mtp is None else mtp.hidden)
        self._slabs: ClassCaches | MixedCaches | None = None
        """Where kernels may write in the batch that was made last: its caches, if they are slabs."""
        self._templates: dict[KvQuantization | None, list[Parts]] = {}
        self._flat: dict[tuple[KvQuantization | None, bool], FlatPasses] = {}
        self._layers: LayersInParts | None = None
        """If passes over chunks may be built in parts."""
        self._like: RowCaches = []
        """Caches of one row that hold a token, once they were needed."""

    def make(self, layout: Layout, store: PrefixStore) -> tuple[Batch, Prefiller]:
        """A batch without rows, and the prefiller whose rows it takes."""
        if layout.caches == "arena":
            self._slabs = None
            return self._batch(layout, ArenaCaches(self._new_rows())), self._arena_prefiller(layout, store)
        if layout.caches == "merged":
            self._slabs = None
            return self._batch(layout, MergedCaches()), self._single_prefiller(store)
        if layout.caches == "mixed":
            self._like = self._like or self._one_token(None)
            mixed = MixedCaches(self._like, layout.slot_policy, width=layout.width, kernels=layout.in_place)
            self._slabs = mixed
            return self._batch(layout, mixed), self._mixed_prefiller(layout, store)
        if layout.caches == "slots":
            self._slabs = None
            slots = SlotCaches(len(new_row_caches(self.model)), layout.slot_policy, mask_dims=layout.mask_dims)
            return self._batch(layout, slots), self._prefiller(layout, store)
        self._slabs = classes = self._class_caches(layout)
        return self._batch(layout, classes), self._prefiller(layout, store)

    def make_draft(
        self, layout: Layout, store: PrefixStore
    ) -> tuple[ForwardPass, ClassCaches, CompiledStep | None, Prefiller]:
        """For a draft model, whose rows are those of another batch: a forward pass over caches by length class, that
        pass as a compiled function if the layout has it, and the prefiller whose rows the caches take."""
        self._slabs = caches = self._class_caches(layout)
        compiled = self._compiled if layout.compiled_step else None
        return ForwardPass(self.model, caches), caches, compiled, self._prefiller(layout, store)

    def forget_templates(self) -> None:
        """Drop what was made from a forward pass: of a rehearsal, it is zeros."""
        self._templates.clear()
        self._like = []

    def check_writes(self, layout: Layout) -> None:
        """Raises `ModelError` if kernels wrote to copies of the slabs. MLX makes a copy for a kernel if an array is not
        contiguous, and the write is lost without an error."""
        if layout.in_place and self._slabs is not None and self._slabs.lost_writes():
            raise ModelError(LOST_WRITES)

    def measure(self, layout: Layout) -> tuple[int, PrefixSizes | None]:
        """Bytes per token in the KV cache, and the sizes of what the prefix cache saves; measured on one token."""
        caches = self._one_token(layout.packing)
        return bytes_per_token(caches), prefix_sizes(caches)

    def _one_token(self, packing: KvQuantization | None) -> RowCaches:
        caches = new_prompt_caches(self.model, packing)
        self.model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
        mx.eval(cache_arrays(caches))
        return caches

    def _batch(self, layout: Layout, caches: Any) -> Batch:
        encoder = self._encoder
        return Batch(
            ForwardPass(self.model, caches),
            self.vocab_size,
            caches,
            kernel=layout.sampling_kernel,
            compiler=self._grammars,
            shift=encoder.rope_delta if encoder is not None and self.model.uses_mrope else None,
            compiled=self._compiled if layout.compiled_step else None,
            watch=self.mtp,
        )

    def _class_caches(self, layout: Layout) -> ClassCaches:
        packing = layout.packing
        if packing not in self._templates:
            self._templates[packing] = [kv_parts(cache) for cache in self._one_token(packing)]
        return ClassCaches(
            self._templates[packing],
            layout.slot_policy,
            width=layout.width,
            kernels=layout.in_place,
            layer=SlabLayer if packing is None else functools.partial(QuantizedSlabLayer, packing),
        )

    def build_in_parts(self, layout: Layout) -> None:
        """From now on prefillers build passes over chunks in parts, if the model allows it."""
        self._layers = layers_in_parts(
            self.model, self.vocab_size, functools.partial(new_prompt_caches, self.model, layout.packing)
        )

    def _single_prefiller(self, store: PrefixStore) -> Prefiller:
        prefill_media = self._encoder.prefill if self._encoder is not None else None
        return SinglePrefiller(self.model, store, prefill_media=prefill_media, watch=self.mtp, layers=self._layers)

    def _new_rows(self) -> Rows:
        return Rows(new_row_caches(self.model))

    def _arena_prefiller(self, layout: Layout, store: PrefixStore) -> Prefiller:
        prefill_media = self._encoder.prefill if self._encoder is not None else None
        return ArenaPrefiller(
            self.model,
            self._new_rows,
            SinglePrefiller(self.model, store, prefill_media=prefill_media, watch=self.mtp),
            store,
            pads=layout.pads_states,
            fill=layout.group_fill or 1.0,
            usual_length=capacity_for if layout.padded_chunks else int,
            watch=self.mtp,
        )

    def _mixed_prefiller(self, layout: Layout, store: PrefixStore) -> Prefiller:
        return MixedPrefiller(
            self.model,
            flat=self.flat_passes(layout),
            min_length_ratio=layout.group_fill,
            prefix_store=store,
            prefill_media=self._encoder.prefill if self._encoder is not None else None,
            pad_chunks=layout.padded_chunks,
            watch=self.mtp,
            layers=self._layers,
            continuing=self._continuing(layout, store, plain=False),
        )

    def _continuing(self, layout: Layout, store: PrefixStore, *, plain: bool) -> ContinuingPrompts | None:
        if not layout.continues:
            return None
        layers = self._layers if self.mtp is None else None
        return ContinuingPrompts(self.model, store, plain=plain, padded=layout.padded_chunks, layers=layers)

    def flat_passes(self, layout: Layout) -> FlatPasses | None:
        """Kept, since what they have traced is. None if prompts do not share such passes."""
        if not layout.flat_prompts or self.mtp is not None:
            return None
        key = (layout.packing, layout.compiled_step)
        if key not in self._flat:
            windows = [layer_window(cache) for cache in new_row_caches(self.model)]
            self._flat[key] = FlatPasses(self.model, windows, layout.packing, compiled=layout.compiled_step)
        return self._flat[key]

    def _prefiller(self, layout: Layout, store: PrefixStore) -> Prefiller:
        return PlainPrefiller(
            self.model,
            len(new_row_caches(self.model)),
            flat=self.flat_passes(layout),
            min_length_ratio=layout.group_fill,
            prefix_store=store,
            quantization=layout.packing,
            prefill_media=self._encoder.prefill if self._encoder is not None else None,
            pad_chunks=layout.padded_chunks,
            watch=self.mtp,
            layers=self._layers,
            continuing=self._continuing(layout, store, plain=True),
        )
