"""How a model is laid out on its device: the form of its layers, how rows share a batch, and what is kept of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from millstream.backend.device import Device
from millstream.backend.generation.batch import Batch
from millstream.backend.generation.caches.batch_caches import (
    MergedCaches,
    RowCaches,
    bytes_per_token,
    cache_arrays,
    new_row_caches,
    unbatchable,
)
from millstream.backend.generation.caches.quantized import (
    KvQuantization,
    QuantizedSlotLayer,
    choose_quantization,
    new_prompt_caches,
    unsupported,
)
from millstream.backend.generation.caches.slots import SlotCaches, fits_slots
from millstream.backend.generation.caches.widths import SlotPolicy, cublas_width, exact, kernel_width, powers_of_two
from millstream.backend.generation.layers.attention import adopt_attention, attention, kernel_attention
from millstream.backend.generation.layers.fused_blocks import fuse_blocks
from millstream.backend.generation.layers.packed_attention import Attention, packed_attention, products_fit
from millstream.backend.generation.prefill.prefiller import BatchPrefiller, Prefiller, SinglePrefiller
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prefix_store.cache_state import leaf_caches, prefix_sizes
from millstream.backend.generation.sampling.guides import Compiler
from millstream.backend.kernels.small_matmul import known_here
from millstream.backend.kernels.write_rows import write_rows
from millstream.backend.layers.cpu_attention import cpu_attention
from millstream.backend.layers.cpu_linear import mkl_layer, pays_here, use_mkl_layout
from millstream.backend.layers.fused_matmul import BY_KERNELS, BY_MLX
from millstream.backend.layers.patch_layers import callers_of, patch_function
from millstream.backend.layers.projections import fuse_projections
from millstream.errors import ModelError
from millstream.model_facts import PrefixSizes

if TYPE_CHECKING:
    from millstream.backend.generation.media.encoder import MediaEncoder

log = logging.getLogger(__name__)

AGREED = 0.1
"""How far, relative to their size, logits of rows together may be from those alone: rounding is far below, and a mask
that is not understood far above."""

LOST = (
    "this build of MLX gives kernels copies of the arrays that they write to, so answers would be wrong: "
    "start with --disable kernel, and please report it"
)


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    kind: Literal["folder", "gguf"]
    path: Path
    max_rows: int
    unpack: bool = True
    disabled: frozenset[str] = frozenset()
    """Fast paths to leave out: see `config.FAST_PATHS`."""
    blas: str | None = None
    """The library that CPU products go through, for the log."""
    cache_limit: int | None = None
    """Bytes of freed memory that MLX may keep for later. None: as many as MLX likes."""
    kv_bits: int = 0
    """Keys and values in 8 or 4 bits; 0 for the type that the model computes in."""
    feature_bytes: int = 256 * 2**20
    """What the encoded images that are kept for later requests may take."""
    like_gpu: bool = False
    """Lay out slots and group prompts as on a GPU, whatever the device: so that the CPU can test it."""
    grammars: Compiler | None = None
    """For rows whose answers must match a grammar."""


class Layout:
    """Owner only. Of one model, from its load on."""

    def __init__(
        self, settings: GenerationSettings, device: Device, model: Any, vocab_size: int, encoder: MediaEncoder | None
    ) -> None:
        self._settings = settings
        self._device = device
        self._model = model
        self.vocab_size = vocab_size
        self._encoder = encoder
        self._slots = False
        self._width: SlotPolicy | None = None
        """How many rows a pass has for so many slots, where the layers call attention of ours."""
        self._mask_dims = 4
        self._made: SlotCaches | None = None
        """The slots of the batch that was made last."""
        self._attention: Attention = scaled_dot_product_attention
        self.packing: KvQuantization | None = None

    def enabled(self, fast_path: str) -> bool:
        return fast_path not in self._settings.disabled

    def shape_layers(self) -> None:
        """Put layers into the form that runs fastest here. Before they are evaluated."""
        turn = self._device.is_cpu and pays_here() and self.enabled("mkl-layout")
        if self.enabled("fuse"):
            fuse_projections(self._model, mkl_layer if turn else lambda layer: layer)
        if turn:
            use_mkl_layout(self._model)
            if not self._settings.like_gpu:
                self._attention = cpu_attention
                patch_function(self._model, "scaled_dot_product_attention", cpu_attention)

    def choose(self, try_two_rows: Callable[[], None], disagreement: Callable[[], float]) -> str | None:
        """Slots for full attention, merged caches for the rest. What stands against batching at all, if anything.

        `disagreement`: how far rows that run together are from the same rows alone.
        """
        if self._settings.kv_bits:
            self._pack(self._settings.kv_bits, try_two_rows)
            return None
        caches = new_row_caches(self._model)
        obstacle = unbatchable(caches)
        if obstacle is not None:
            return obstacle
        self._slots = self.enabled("slots") and fits_slots(caches)
        if self._slots and (self._on_cuda or self._settings.like_gpu):
            attend = kernel_attention if self._on_cuda else attention
            if adopt_attention(self._model, attend) == len(caches):
                self._width = kernel_width if self._adopt_rows(attend) else cublas_width
        trouble = self._settled(caches, try_two_rows, disagreement)
        if trouble:
            self._slots = False
            log.warning("the model cannot run two rows at once: %s", trouble)
        if self.in_place and self._made is not None and self._made.has_holes():
            raise ModelError(LOST)
        return "this model" if trouble else None

    def fresh(self, kept: PrefixStore) -> tuple[Batch, Prefiller]:
        """A batch without rows, and what reads prompts for it."""
        encoder = self._encoder
        make = functools.partial(
            Batch,
            self._model,
            self.vocab_size,
            kernel=self._on_cuda,
            compiler=self._settings.grammars,
            shift=encoder.rope_delta if encoder is not None and self._model.uses_mrope else None,
        )
        see = encoder.prefill if encoder is not None else None
        if not self._slots:
            return make(MergedCaches()), SinglePrefiller(self._model, kept, prefill_media=see)
        layers = len(new_row_caches(self._model))
        on_cpu = self._device.is_cpu and not self._settings.like_gpu
        policy = exact if on_cpu else powers_of_two
        if self.packing is not None:
            layer = functools.partial(QuantizedSlotLayer, self.packing)
            reader = BatchPrefiller(
                self._model, layers, min_length_ratio=None, prefix_store=kept, quantization=self.packing
            )
            return make(SlotCaches(layers, policy, layer=layer)), reader
        # Padding is computed like everything else: almost for nothing on a GPU, for real on the CPU.
        groups = self.enabled("group-prefill") and self._mask_dims == 4
        fill = (0.75 if on_cpu else 0.5) if groups else None
        place = write_rows if self.in_place else None
        caches = SlotCaches(layers, policy, width=self._width, write_rows=place, mask_dims=self._mask_dims)
        self._made = caches
        padded = (self._on_cuda or self._settings.like_gpu) and see is None
        return make(caches), BatchPrefiller(
            self._model, layers, min_length_ratio=fill, prefix_store=kept, prefill_media=see, pad_chunks=padded
        )

    def probe(self) -> tuple[int, PrefixSizes | None]:
        """What a token takes in the caches, and what it takes to keep it, measured on one."""
        caches = new_prompt_caches(self._model, self.packing)
        self._model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
        mx.eval(cache_arrays(caches))
        return bytes_per_token(caches), prefix_sizes(caches)

    @property
    def in_place(self) -> bool:
        """Whether slots are written by kernels of ours, so that nobody has to wait until the device has read them."""
        return self._width is not None and self._on_cuda

    def _adopt_rows(self, attend: Attention) -> bool:
        """Products of few rows by kernels; off CUDA by what these stand for, so that the CPU can test it."""
        if not self.enabled("fused-matmul") or (self._on_cuda and not known_here()):
            return False
        return fuse_blocks(self._model, BY_KERNELS if self._on_cuda else BY_MLX, attend) > 0

    @property
    def _on_cuda(self) -> bool:
        return self._device.kind == "cuda" and self.enabled("kernel")

    def _pack(self, bits: int, try_two_rows: Callable[[], None]) -> None:
        """Quantised keys and values: only over slots, and with attention that knows how to read them."""
        if self._encoder is not None:
            raise unsupported(bits, "it takes images, and quantised keys and values are for text models")
        self.packing = choose_quantization(self._model, bits)
        if not self.enabled("slots"):
            raise unsupported(bits, "it needs slots, and --disable slots leaves them out")
        self._slots = True
        products = products_fit(self._device.kind) and not self._settings.like_gpu
        reads = packed_attention(self._attention, products=products)
        patch_function(self._model, "scaled_dot_product_attention", reads)
        if trouble := self._trouble(try_two_rows):
            raise unsupported(bits, f"its attention cannot read quantised keys and values ({trouble})")

    def _settled(
        self, caches: RowCaches, try_two_rows: Callable[[], None], disagreement: Callable[[], float]
    ) -> str | None:
        """Find a way in which rows run together as they run alone; what is wrong with the last, if none is right."""
        trouble = self._trouble(try_two_rows)
        if trouble and self._width is not None:
            self._width = None
            log.info("this model decodes without our attention: %s", trouble)
            trouble = self._trouble(try_two_rows)
        attending = sum(hasattr(leaf, "keys") for leaf in leaf_caches(caches))
        if len(callers_of(self._model, "scaled_dot_product_attention")) >= attending:
            return trouble
        # Attention of its own making: masks may mean something else there (Gemma 2 has scores of five dimensions), and
        # answers would be wrong without any error.
        for dims in (4, 5) if self._slots else (4,):
            self._mask_dims = dims
            trouble = self._trouble(try_two_rows)
            if not trouble and disagreement() <= AGREED:
                return None
        return trouble or "its rows answer otherwise together than alone"

    def _trouble(self, try_two_rows: Callable[[], None]) -> str | None:
        """Some models cannot take a batch although their caches can."""
        try:
            try_two_rows()
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            return str(error) or type(error).__name__
        return None
