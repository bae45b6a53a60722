"""Transformer blocks whose decode step is a few launches: small-batch matmuls fused with what stands around them.

A block is understood from its module tree (`block_frame`, `block_parts`), and what was understood is checked by its
numbers (`block_check`). Each half of a block, mixer and MLP, gets the first form that agrees: fused as a whole, fused
at its outer layers, or as mlx-lm wrote it. Prefill chunks go through the same functions, by matmuls of MLX. In all
models single linear layers use the kernels as well.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.caches.flat_caches import FlatStates
from millstream.backend.generation.caches.widths import CHUNK_LENGTHS
from millstream.backend.generation.layers.block_frame import NotUnderstood
from millstream.backend.generation.layers.block_search import BlockSearch, FusedBlock
from millstream.backend.generation.layers.patched_experts import restore_mixtures
from millstream.backend.kernels.matmul_tilings import MOST_ROWS
from millstream.backend.kernels.matmul_tuning import is_many, stands_for
from millstream.backend.kernels.small_matmul import STEP_WIDTHS
from millstream.backend.layers.fused_matmul import BY_CUBLAS, BY_KERNELS, Dense, FusedMatmuls
from millstream.backend.layers.matmul_check import check_calls
from millstream.backend.layers.matmul_choice import dtype_of
from millstream.backend.layers.packed_linear import PackedEmbedding, PackedLinear, use_packed_products
from millstream.backend.layers.packed_products import packed_weight
from millstream.backend.layers.projections import joined_layers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fusion:
    """What of a model uses fused matmuls."""

    blocks: int
    """Blocks of which at least a part is fused."""
    linears: int = 0
    """Single linear layers beside them."""
    attending: int = 0
    """Blocks that need none of mlx-lm's attention code when rows decode."""
    refused: str | None = None
    """Why the first block that was left alone was."""
    forms: tuple[tuple[str, int], ...] = ()
    """In which forms blocks are fused, and how many in each."""
    total: int = 0

    def __bool__(self) -> bool:
        return self.blocks + self.linears > 0

    @property
    def note(self) -> str:
        """One line for the log and for `/v1/models`."""
        forms = ", ".join(f"{count} with {form}" for form, count in self.forms)
        rest = f"; {self.refused}" if self.refused is not None else ""
        return f"fused blocks: {self.blocks} of {self.total}" + (f" ({forms})" if forms else "") + rest


def fuse_blocks(model: Any, matmuls: FusedMatmuls, attend: Callable[..., mx.array]) -> Fusion:
    """Have the model's blocks and linear layers compute few rows by `matmuls`. `attend` is the attention that the
    layers call. Weights must be evaluated."""
    layers, caches = list(model.layers), new_row_caches(model)
    search = BlockSearch(matmuls, BY_CUBLAS if matmuls is BY_KERNELS else matmuls, attend)
    forms: Counter[str] = Counter()
    refused, attending = None, 0
    for index, block in enumerate(layers):
        new_cache = functools.partial(_new_cache, model, index) if len(caches) == len(layers) else None
        try:
            fused = search.fuse(block, new_cache)
        except NotUnderstood as why:
            refused = refused or f"layer {index} {why}"
            continue
        forms[fused.form] += 1
        attending += fused.attends
        refused = refused or (f"layer {index}: {fused.left_out}" if fused.left_out else None)
        block._fused = fused
        kind: Any = type(block)
        block.__class__ = _fused_class(kind)
    fusion = Fusion(forms.total(), _fuse_linears(model, matmuls), attending, refused, tuple(forms.items()), len(layers))
    log.info("%s", fusion.note)
    return fusion


def unfuse_blocks(model: Any) -> int:
    """Have the blocks compute as mlx-lm wrote them. Returns how many did not."""
    fused = [block for block in model.layers if hasattr(block, "_fused")]
    for block in fused:
        block.__class__ = type(block).__bases__[0]
        del block._fused
    restore_mixtures(model)
    return len(fused)


def _new_cache(model: Any, index: int) -> Any:
    return new_row_caches(model)[index]


def _fuse_linears(model: Any, matmuls: FusedMatmuls) -> int:
    if matmuls is not BY_KERNELS:
        return 0
    layers = [module for _, module in model.named_modules()] + joined_layers(model)
    linears = use_packed_products(layers)
    for layer in layers:
        kind: Any = SMALL_MATMULS.get(type(layer))
        if kind is not None and matmuls.fits(layer.weight):
            layer.__class__ = kind
            linears += kind is SmallMatmulLinear
    heads = [module for name, module in model.named_modules() if name.endswith("lm_head")]
    embeddings = [layer for layer in layers if type(layer) in (SmallMatmulEmbedding, PackedEmbedding)]
    for head in heads or embeddings:
        if type(head) in SMALL_MATMULS.values():
            matmuls.prepare(head.weight, "matmul")
    kinds = (SmallMatmulLinear, PackedLinear)
    _check_linears([*(layer for layer in layers if isinstance(layer, kinds)), *([] if heads else embeddings)])
    return linears


def _check_linears(layers: list[Any]) -> None:
    """Have their kernels compared with MLX's operations."""
    quantised = (PackedLinear, PackedEmbedding)
    weights = [packed_weight(layer) if isinstance(layer, quantised) else Dense(layer.weight) for layer in layers]
    check_calls(
        lambda: [BY_KERNELS.matmul(mx.zeros((1, 1, each.inputs), dtype=dtype_of(each)), each) for each in weights]
    )


def _is_decode(x: mx.array, dtype: mx.Dtype, *, many: bool = True) -> bool:
    """True if the kernels can take x: one token per row, a width that they are compiled for, the weight's type. A pass
    that stands for a step of such a width may be wider. `many`: so may a step."""
    if x.ndim != 3 or x.shape[1] != 1 or x.dtype != dtype:
        return False
    if many and is_many(x.shape[0]):
        return True
    return x.shape[0] in STEP_WIDTHS or (stands_for() is not None and x.shape[0] <= MOST_ROWS)


def _is_chunk(x: mx.array, cache: Any, dtype: mx.Dtype) -> bool:
    """True if x is a prefill chunk of one of the usual lengths: each is compiled once."""
    usual = x.shape[0] == 1 and x.shape[1] in CHUNK_LENGTHS and x.dtype == dtype
    return usual and type(cache) in (KVCache, QuantizedKVCache, RotatingKVCache)


_small_matmul = BY_KERNELS.compile(BY_KERNELS.matmul)


class SmallMatmulLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that computes few rows by our kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        if not _is_decode(x, self.weight.dtype):
            out: mx.array = super().__call__(x)
            return out
        out = _small_matmul(x, self.weight)
        return out + self.bias if "bias" in self else out


class SmallMatmulEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding that is the output layer too, and computes few rows by our kernel."""

    def as_linear(self, x: mx.array) -> mx.array:
        out: mx.array = _small_matmul(x, self.weight) if _is_decode(x, self.weight.dtype) else super().as_linear(x)
        return out


SMALL_MATMULS: dict[type, type] = {nn.Linear: SmallMatmulLinear, nn.Embedding: SmallMatmulEmbedding}


@functools.lru_cache(maxsize=4)
def _start(offset: int) -> mx.array:
    """The position of a chunk, for all layers: one of several numbers, since MLX keeps arrays of up to 8 bytes in the
    host's memory, from where every block of a kernel would read it over the bus."""
    start = mx.full((4,), offset, dtype=mx.int32)[:1]
    mx.async_eval(start)  # type: ignore[no-untyped-call]
    return start


@functools.cache
def _fused_class(kind: Any) -> type:
    """A subclass of `kind` that is fused for decode steps and for prefill chunks."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        fused: FusedBlock = self._fused
        # A batch tells where each of its rows is.
        if not fused.attends or isinstance(getattr(cache, "offset", None), mx.array):
            if _is_decode(x, fused.dtype, many=fused.takes_many):
                return fused.decode(x, mask, cache)
            if (fused.attends or isinstance(cache, FlatStates)) and x.shape[1] == 1:
                return fused.chunk(x, mask, cache, cache.offset)
        elif _is_chunk(x, cache, fused.dtype):
            return fused.chunk(x, mask, cache, _start(cache.offset))
        out: mx.array = kind.__call__(self, x, mask, cache)
        return out

    return type(kind.__name__, (kind,), {"__call__": call})
