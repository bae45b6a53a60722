"""How a model runs on its device: what was chosen at load, as plain data. See `layout_choice/`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millstream.backend.generation.caches.quantized import KvQuantization
from millstream.backend.generation.caches.widths import SlotPolicy, exact, kernel_width
from millstream.backend.kernels.matmul_tuning import exact_passes

AttentionKind = Literal["mlx-lm", "cpu", "kernels", "packed"]


@dataclass(frozen=True, slots=True)
class Layout:
    """What was chosen for one model, and why."""

    caches: Literal["classes", "slots", "mixed", "merged", "arena"]
    """Length classes for full attention; slots in one rectangle if its layers have attention of their own; for models
    with sliding windows or recurrent layers, length classes, rings and states (mixed), or mlx-lm's caches for all
    layers (merged). If they were asked for: arenas with a position map, for layers of every kind."""
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
    pads_states: bool = True
    """True if prompts of unequal lengths share a pass: states end where their row does."""
    queued: bool = True
    """True if a decode step is given to the device before the last one is read; else it is built before, and given to
    the device then, so that it writes in place."""
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
