"""Fuses a model's blocks at load, or leaves them as mlx-lm wrote them."""

from __future__ import annotations

import logging
from typing import Any

from millstream.backend.generation.layers.fused_blocks import Fusion, fuse_blocks, unfuse_blocks
from millstream.backend.generation.layers.slab_attention import Attention
from millstream.backend.generation.layout_choice.fast_paths import FastPaths
from millstream.backend.kernels.matmul_tuning import expect_rows
from millstream.backend.kernels.small_matmul import supported_here
from millstream.backend.layers.fused_matmul import BY_KERNELS, BY_MLX
from millstream.backend.layers.packed_products import measure_packed_products, packed_layers

log = logging.getLogger(__name__)


class BlockFusion:
    """Owner only."""

    def __init__(self, model: Any, paths: FastPaths, max_rows: int) -> None:
        self._model = model
        self._paths = paths
        self._max_rows = max_rows
        self._fusion: Fusion | None = None

    def fuse(self, attend: Attention) -> Fusion | None:
        """Off CUDA by MLX's own operations, so that the CPU can test it."""
        paths = self._paths
        if paths.on_cuda and not supported_here():
            paths.decline("fused-matmul", "needs compute capability 8.0")
        if not paths.enabled("fused-matmul"):
            return None
        if paths.on_cuda:
            expect_rows(self._max_rows)
        fusion = fuse_blocks(self._model, BY_KERNELS if paths.on_cuda else BY_MLX, attend)
        if paths.on_cuda:  # after the kernels were chosen that it compares with
            measure_packed_products(self._model)
        if not fusion:
            paths.decline("fused-matmul", fusion.refused or "no layers that fit")
            return None
        self._fusion = fusion
        return fusion

    def undo(self, trouble: str) -> bool:
        """Leave the blocks as mlx-lm wrote them. False if they are."""
        if not self._paths.enabled("fused-matmul"):
            return False
        log.info("This model decodes without fused blocks: %s", trouble)
        self._paths.decline("fused-matmul", trouble)
        return unfuse_blocks(self._model) > 0

    def explain_packed_layers(self) -> None:
        """Say why quantised weights are not computed with as they are."""
        if not self._paths.enabled("fused-matmul"):
            self._paths.decline("packed-matmul", "needs fused-matmul")
        elif not packed_layers(self._model):
            self._paths.decline("packed-matmul", "no packed weights")

    @property
    def notes(self) -> tuple[str, ...]:
        """Which parts of the blocks are fused."""
        return () if self._fusion is None or not self._paths.enabled("fused-matmul") else (self._fusion.note,)
