"""Finds the fused form of a block: for each of its halves, the first form whose numbers agree with mlx-lm's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.generation.layers.block_check import (
    agree,
    check_attention,
    check_chunk,
    check_half,
    check_matmuls,
    check_module,
    check_rope,
    check_rows,
    checked_frame,
    half_difference,
    random_rows,
    uncompiled,
)
from millstream.backend.generation.layers.block_frame import Frame, NotUnderstood, hidden_size
from millstream.backend.generation.layers.block_parts import (
    ACTIVATIONS,
    ConvParts,
    GluParts,
    attention_parts,
    block_dtype,
    conv_parts,
    glu_parts,
    has_experts,
    projects_heads,
    rope_module,
)
from millstream.backend.generation.layers.fused_experts import MANY_ROWS, UNSURE, FusedExperts, fuse_experts, ops_for
from millstream.backend.generation.layers.fused_modules import FusedModule
from millstream.backend.generation.layers.fused_parts import FusedAttention, FusedConv, FusedGlu, PlainPart
from millstream.backend.generation.layers.patched_experts import ChunkExperts, fuse_expert_layer, fuse_mixture
from millstream.backend.layers import expert_ops
from millstream.backend.layers.fused_matmul import BY_KERNELS, BY_MLX, FusedMatmuls

NewCache = Callable[[], Any]
Mixer = FusedAttention | FusedConv | FusedModule | PlainPart
ChunkMixer = FusedAttention | PlainPart
Mlp = FusedGlu | FusedExperts | ChunkExperts | FusedModule | PlainPart


@dataclass(frozen=True, slots=True, eq=False)
class FusedBlock:
    """A block as it runs."""

    mixer: Mixer
    mlp: Mlp | None
    chunk_mixer: ChunkMixer
    chunk_mlp: Mlp | None
    scale: mx.array | None
    dtype: mx.Dtype
    form: str
    """What is fused of it, in words."""
    left_out: str | None
    """Why something of it is not."""

    @property
    def attends(self) -> bool:
        """True if all of its attention is fused."""
        return isinstance(self.mixer, FusedAttention)

    @property
    def takes_many(self) -> bool:
        """True if all of it is matmuls that know what is fastest for a step of many rows, and attention."""
        return self.attends and isinstance(self.mlp, FusedGlu)

    def decode(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        h = self.mixer.run(x, mask, cache)
        if isinstance(self.mlp, FusedExperts):
            h = self.mlp.run(h, live_rows(cache, h.shape[0]))
        elif self.mlp is not None:
            h = self.mlp.run(h)
        return h if self.scale is None else h * self.scale

    def chunk(self, x: mx.array, mask: Any, cache: Any, offset: mx.array) -> mx.array:
        h = self.chunk_mixer.run(x, mask, cache, offset)
        if isinstance(self.chunk_mlp, ChunkExperts):
            h = self.chunk_mlp.run(h, live_rows(cache, h.size // h.shape[-1]))
        elif self.chunk_mlp is not None:
            h = self.chunk_mlp.run(h)
        return h if self.scale is None else h * self.scale


def live_rows(cache: Any, rows: int) -> mx.array | None:
    """An array that is negative for vacant rows: a batch tells where each of its rows is. None if it does not."""
    offset = getattr(cache, "offset", None)
    known = isinstance(offset, mx.array) and offset.shape == (rows,) and offset.dtype == mx.int32
    return offset if known else None


class BlockSearch:
    """Searches with one implementation of matmuls for decode steps and one for chunks."""

    def __init__(self, matmuls: FusedMatmuls, chunk_matmuls: FusedMatmuls, attend: Callable[..., mx.array]) -> None:
        self._matmuls, self._chunk_matmuls, self._attend = matmuls, chunk_matmuls, attend
        self._activations: dict[Hashable, str] = {}
        """By the kind of an MLP and of its block: what its gate goes through."""
        self._understood: set[tuple[Hashable, ...]] = set()

    def fuse(self, block: Any, new_cache: NewCache | None) -> FusedBlock:
        """`new_cache` makes a cache for one row; None if it is not known which cache is the block's. Raises
        `NotUnderstood` if nothing can be fused."""
        dtype = block_dtype(block)
        frame = checked_frame(block)
        why: list[str] = []
        mixer, chunk_mixer, mixer_form = self._mixer(block, frame, dtype, new_cache, why)
        mlp, chunk_mlp, mlp_form = self._mlp(block, frame, dtype, why)
        if not mixer_form and not mlp_form:
            raise NotUnderstood(f"has nothing to fuse: {why[0]}" if why else "has nothing to fuse")
        form = " and ".join(each for each in (mixer_form, mlp_form) if each)
        return FusedBlock(
            *(mixer, mlp, chunk_mixer, chunk_mlp, frame.scale, dtype, form), left_out="; ".join(why) or None
        )

    def _mixer(
        self, block: Any, frame: Frame, dtype: mx.Dtype, new_cache: NewCache | None, why: list[str]
    ) -> tuple[Mixer, ChunkMixer, str]:
        module = block[frame.mixer]
        call = lambda x, mask, cache, *_: frame.call_mixer(module, x, mask, cache)  # noqa: E731
        plain = PlainPart(frame, frame.before_mixer, frame.after_mixer, call)
        size = hidden_size(block)
        if projects_heads(module):
            try:
                return *self._attention(module, frame, plain, size, dtype), "attention"
            except NotUnderstood as error:
                why.append(f"{frame.mixer} {error}")
        if new_cache is None:
            return plain, plain, ""
        if (conv := conv_parts(module)) is not None:
            try:
                return self._conv(conv, frame, plain, new_cache, size, dtype), plain, "convolution"
            except NotUnderstood as error:
                why.append(f"{frame.mixer} {error}")
        try:
            x = mx.random.normal((1, 1, size), key=mx.random.key(10)).astype(dtype)
            fused = FusedModule(
                module,
                frame,
                (frame.before_mixer, frame.after_mixer),
                self._matmuls,
                lambda watched, each: frame.call_mixer(watched, each, None, new_cache()),
                x,
            )
            check_matmuls(self._matmuls, fused, size, dtype)
            check_module(plain.run, fused.run, new_cache, size, dtype)
        except NotUnderstood as error:
            why.append(f"{frame.mixer} {error}")
            return plain, plain, ""
        return fused, plain, f"the projections of {frame.mixer}"

    def _attention(
        self, module: Any, frame: Frame, plain: PlainPart, size: int, dtype: mx.Dtype
    ) -> tuple[FusedAttention, FusedAttention]:
        parts = attention_parts(module)
        if parts.rope is not None:
            check_rope(rope_module(module), parts.rope, parts.size)
        decode = FusedAttention(parts, frame, self._matmuls, self._attend)
        chunk = FusedAttention(parts, frame, self._chunk_matmuls, self._attend)
        if self._is_new(str(type(module)), frame.names, parts.form):
            with uncompiled():
                check_chunk(plain.run, FusedAttention(parts, frame, BY_MLX, self._attend), size, mx.float32)
        check_matmuls(self._matmuls, decode, size, dtype)
        check_attention(plain.run, parts, decode, chunk, size, dtype, kernels=self._matmuls is BY_KERNELS)
        return decode, chunk

    def _conv(
        self, parts: ConvParts, frame: Frame, plain: PlainPart, new_cache: NewCache, size: int, dtype: mx.Dtype
    ) -> FusedConv:
        if self._is_new("convolution", frame.names):
            with uncompiled():
                check_module(plain.run, FusedConv(parts, frame, BY_MLX, plain).run, new_cache, size, mx.float32)
        fused = FusedConv(parts, frame, self._matmuls, plain)
        check_matmuls(self._matmuls, fused, size, dtype)
        check_module(plain.run, fused.run, new_cache, size, dtype)
        return fused

    def _is_new(self, *understood: Hashable) -> bool:
        """True the first time. Rounding of half precision hides small differences, so what was understood is first
        checked in float32, but once and not for every layer."""
        new = understood not in self._understood
        self._understood.add(understood)
        return new

    def _mlp(self, block: Any, frame: Frame, dtype: mx.Dtype, why: list[str]) -> tuple[Mlp | None, Mlp | None, str]:
        if frame.mlp is None:
            return None, None, ""
        module, size = block[frame.mlp], hidden_size(block)
        plain = PlainPart(frame, frame.before_mlp, frame.after_mlp, module)
        if has_experts(module):
            return self._experts(module, frame, plain, size, dtype, why)
        if (parts := glu_parts(module)) is not None:
            try:
                return *self._glu(module, parts, frame, plain, size, dtype), "MLP"
            except NotUnderstood as error:
                why.append(f"{frame.mlp} {error}")
        try:
            x = mx.random.normal((1, 1, size), key=mx.random.key(11)).astype(dtype)
            norms = (frame.before_mlp, frame.after_mlp)
            fused = FusedModule(module, frame, norms, self._matmuls, lambda watched, each: watched(each), x)
            check_matmuls(self._matmuls, fused, size, dtype)
            check_half(plain.run, fused.run, size, dtype)
        except NotUnderstood as error:
            why.append(f"{frame.mlp} {error}")
            return plain, plain, ""
        return fused, plain, f"the projections of {frame.mlp}"

    def _experts(
        self, module: Any, frame: Frame, plain: PlainPart, size: int, dtype: mx.Dtype, why: list[str]
    ) -> tuple[Mlp, Mlp, str]:
        try:
            fused = fuse_experts(module, frame, plain.run, self._matmuls, size, dtype)
        except NotUnderstood as error:
            why.append(f"{frame.mlp} {error}")
            return plain, plain, "a layer of experts" if fuse_expert_layer(module, self._matmuls, dtype) else ""
        fuse_expert_layer(module, self._matmuls, dtype)
        chunk: ChunkExperts | None = None
        own = PlainPart(frame, frame.before_mlp, frame.after_mlp, module.__call__)
        try:
            mixture = fuse_mixture(module, fused.parts, ops_for(self._matmuls), expert_ops.BY_MLX, dtype)
            if (chunk := mixture.with_frame(frame)) is not None:
                check_rows(own.run, chunk.run, random_rows(size, dtype, MANY_ROWS), UNSURE)
        except NotUnderstood as error:
            chunk = None
            why.append(f"{frame.mlp}, for many tokens, {error}")
        return fused, plain if chunk is None else chunk, "experts"

    def _glu(
        self, module: Any, parts: GluParts, frame: Frame, plain: PlainPart, size: int, dtype: mx.Dtype
    ) -> tuple[FusedGlu, FusedGlu]:
        key = (str(type(module)), frame.names)
        if key not in self._activations:
            # In float32, or GELU and its approximation would look the same.
            found = {}
            with uncompiled():
                for each in ACTIVATIONS:
                    fused = FusedGlu(dataclasses.replace(parts, activation=each), frame, BY_MLX)
                    found[each] = half_difference(plain.run, fused.run, size, mx.float32)
            self._activations[key] = min(ACTIVATIONS, key=lambda each: found[each])
            agree(min(found.values()), mx.float32)
        chosen = dataclasses.replace(parts, activation=self._activations[key])
        decode, chunk = (FusedGlu(chosen, frame, by) for by in (self._matmuls, self._chunk_matmuls))
        check_matmuls(self._matmuls, decode, size, dtype)
        for number, form in enumerate((decode, chunk)):
            check_half(plain.run, form.run, size, dtype, number)
        return decode, chunk
