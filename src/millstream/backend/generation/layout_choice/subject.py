"""The model that a layout is chosen for, on its device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.models.base import scaled_dot_product_attention

from millstream.backend.device import Device
from millstream.backend.generation.caches.widths import SlotPolicy, eighths, exact, powers_of_two
from millstream.backend.generation.layers.slab_attention import Attention
from millstream.backend.generation.layout import AttentionKind, Layout
from millstream.backend.generation.layout_choice.block_fusion import BlockFusion
from millstream.backend.generation.layout_choice.fast_paths import FastPaths
from millstream.backend.generation.sampling.kernel_check import kernel_agrees
from millstream.backend.generation.settings import GenerationSettings
from millstream.backend.layers.cpu_attention import cpu_attention


@dataclass(slots=True)
class Subject:
    settings: GenerationSettings
    device: Device
    model: Any
    takes_media: bool
    attention: Attention = scaled_dot_product_attention
    """What mlx-lm's layers call, or what was put in its place."""
    paths: FastPaths = field(init=False)
    fusion: BlockFusion = field(init=False)

    def __post_init__(self) -> None:
        self.paths = FastPaths(self.settings, self.device)
        self.fusion = BlockFusion(self.model, self.paths, self.settings.max_rows)

    @property
    def plain_slots(self) -> SlotPolicy:
        """Numbers for some rows where MLX's own operations compute a step."""
        return eighths if self.paths.as_on_gpu else exact

    @property
    def plain_attention(self) -> AttentionKind:
        return "cpu" if self.attention is cpu_attention else "mlx-lm"

    def without_kernels(self, layout: Layout) -> Layout:
        """The same layout by MLX's own operations: numbers and widths that were made for kernels go with them."""
        return dataclasses.replace(
            layout, in_place=False, attention=self.plain_attention, width=None, slot_policy=self.plain_slots
        )

    def draft(self) -> Layout:
        """The layout to begin with, before anything is tried."""
        paths = self.paths
        # Padding is computed like everything else: almost for nothing on a GPU, at full cost on the CPU.
        fill = 0.5 if paths.as_on_gpu else 0.75
        return Layout(
            caches="slots" if paths.enabled("slots") else "merged",
            attention=self.plain_attention,
            slot_policy=powers_of_two if paths.wide else self.plain_slots,
            group_fill=fill if paths.enabled("group-prefill") else None,
            padded_chunks=paths.wide and not self.takes_media,
            sampling_kernel=paths.on_cuda and kernel_agrees(self.model),
        )
