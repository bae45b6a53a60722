"""Whisper's encoder and decoder. Owner only.

mlx-audio has Whisper too, but runs one window at a time, from begin to end. Here rows of many requests share each pass,
and join and leave at any token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from millstream.backend.transcription.whisper.arithmetic import Arithmetic
from millstream.backend.transcription.whisper.weights import Linear, Norm, Weights
from millstream.models.transcription_layout import WhisperShape

KeysValues = tuple[mx.array, mx.array]
"""Of one layer: (rows, heads, positions, values per head) each."""


class StepCache(Protocol):
    """What `Decoder.step` needs of the rows' KV cache."""

    @property
    def mask(self) -> mx.array | None:
        """True for each column that a row sees: (rows, 1, 1, columns). None: all of them."""
        ...

    def append(self, layer: int, keys: mx.array, values: mx.array) -> KeysValues:
        """Adds one token per row. Returns what the rows see."""
        ...


@dataclass(frozen=True, slots=True)
class _Attention:
    norm: Norm
    qkv: Linear
    out: Linear


@dataclass(frozen=True, slots=True)
class _Mlp:
    norm: Norm
    up: Linear
    down: Linear

    def __call__(self, x: mx.array, arithmetic: Arithmetic) -> mx.array:
        return x + self.down(arithmetic.gelu(self.up(self.norm(x))))


class Encoder:
    def __init__(self, shape: WhisperShape, weights: Weights, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._heads = shape.audio_heads
        self._convolutions = [weights.convolution(f"encoder.conv{number}") for number in (1, 2)]
        self._positions = (
            weights.tensor("encoder.positional_embedding", shape.audio_positions, shape.width)
            if weights.has("encoder.positional_embedding")
            else sinusoids(shape.audio_positions, shape.width).astype(weights.dtype)
        )
        self._layers = [
            (_attention(weights, f"encoder.blocks.{number}.attn"), _mlp(weights, f"encoder.blocks.{number}"))
            for number in range(shape.audio_layers)
        ]
        self._norm = weights.norm("encoder.ln_post")

    def __call__(self, mel: mx.array) -> mx.array:
        """(rows, frames, mels) to (rows, positions, width); there may be fewer frames than in a whole window. A row's
        result does not depend on the others."""
        first, second = self._convolutions
        x = self._arithmetic.gelu(first(_three_frames(mel, 1)))
        x = self._arithmetic.gelu(second(_three_frames(x, 2))) + self._positions[: mel.shape[1] // 2]
        for attention, mlp in self._layers:
            queries, keys, values = _split(attention.qkv(attention.norm(x)), 3, self._heads)
            x = mlp(x + attention.out(_joined(self._arithmetic.attend(queries, keys, values))), self._arithmetic)
        return self._norm(x)


@dataclass(frozen=True, slots=True)
class _DecoderLayer:
    attention: _Attention
    cross_norm: Norm
    cross_query: Linear
    cross_kv: Linear
    cross_out: Linear
    mlp: _Mlp


class Decoder:
    def __init__(self, shape: WhisperShape, weights: Weights, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._heads = shape.text_heads
        self._embedding = weights.tensor("decoder.token_embedding.weight", shape.vocab, shape.width)
        self._positions = weights.tensor("decoder.positional_embedding", shape.text_positions, shape.width)
        self._layers = [_decoder_layer(weights, f"decoder.blocks.{number}") for number in range(shape.text_layers)]
        self._norm = weights.norm("decoder.ln")

    def cross(self, audio: mx.array) -> list[KeysValues]:
        """The keys and values of the audio in each layer: computed once per window."""
        pairs = (_split(layer.cross_kv(audio), 2, self._heads) for layer in self._layers)
        return [(mx.contiguous(keys), mx.contiguous(values)) for keys, values in pairs]

    def prefill(
        self, tokens: mx.array, cross: Sequence[KeysValues], watched: Sequence[tuple[int, int]] = ()
    ) -> tuple[mx.array, list[KeysValues], list[mx.array]]:
        """Reads (rows, tokens) from the begin. Returns the hidden states, the keys and values, and of each watched
        (layer, head) how its queries match the audio: (rows, tokens, positions) before the softmax."""
        length = tokens.shape[1]
        x = self._embedding[tokens] + self._positions[:length]
        caches: list[KeysValues] = []
        matches: dict[tuple[int, int], mx.array] = {}
        for number, (layer, audio) in enumerate(zip(self._layers, cross, strict=True)):
            queries, keys, values = _split(layer.attention.qkv(layer.attention.norm(x)), 3, self._heads)
            caches.append((keys, values))
            mask = "causal" if length > 1 else None
            x = x + layer.attention.out(_joined(self._arithmetic.attend(queries, keys, values, mask)))
            (queries,) = _split(layer.cross_query(layer.cross_norm(x)), 1, self._heads)
            for head in [head for watched_layer, head in watched if watched_layer == number]:
                match = queries[:, head] @ audio[0][:, head].swapaxes(1, 2)
                matches[number, head] = match.astype(mx.float32) * queries.shape[-1] ** -0.5
            x = layer.mlp(x + layer.cross_out(_joined(self._arithmetic.attend(queries, *audio))), self._arithmetic)
        return self._norm(x), caches, [matches[each] for each in watched]

    def step(self, tokens: mx.array, positions: mx.array, cross: Sequence[KeysValues], cache: StepCache) -> mx.array:
        """One token per row. Returns the hidden states, (rows, width)."""
        x = (self._embedding[tokens] + self._positions[positions])[:, None]
        for number, (layer, audio) in enumerate(zip(self._layers, cross, strict=True)):
            queries, keys, values = _split(layer.attention.qkv(layer.attention.norm(x)), 3, self._heads)
            seen = cache.append(number, keys, values)
            x = x + layer.attention.out(_joined(self._arithmetic.attend(queries, *seen, cache.mask)))
            (queries,) = _split(layer.cross_query(layer.cross_norm(x)), 1, self._heads)
            x = layer.mlp(x + layer.cross_out(_joined(self._arithmetic.attend(queries, *audio))), self._arithmetic)
        return self._norm(x)[:, 0]

    def logits(self, hidden: mx.array) -> mx.array:
        """In 32 bits, whatever the weights have."""
        return self._arithmetic.tied_logits(hidden, self._embedding).astype(mx.float32)


def sinusoids(length: int, width: int) -> mx.array:
    scales = np.exp(-np.log(10_000) / (width // 2 - 1) * np.arange(width // 2))
    angles = np.arange(length)[:, None] * scales[None]
    return mx.array(np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32))


def _three_frames(x: mx.array, stride: int) -> mx.array:
    """Each frame beside its neighbours; every `stride`-th frame."""
    length = x.shape[1]
    padded = mx.pad(x, [(0, 0), (1, 1), (0, 0)])
    return mx.concatenate([padded[:, shift : shift + length : stride] for shift in range(3)], axis=-1)


def _split(x: mx.array, parts: int, heads: int) -> tuple[mx.array, ...]:
    """(rows, positions, parts * width) to (rows, heads, positions, values per head) for each part."""
    rows, length, width = x.shape
    split = x.reshape(rows, length, parts, heads, width // parts // heads).transpose(2, 0, 3, 1, 4)
    return tuple(split[part] for part in range(parts))


def _joined(x: mx.array) -> mx.array:
    """(rows, heads, positions, values per head) to (rows, positions, width)."""
    rows, heads, length, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(rows, length, heads * size)


def _attention(weights: Weights, name: str) -> _Attention:
    qkv = weights.linear(*(f"{name}.{part}" for part in ("query", "key", "value")))
    return _Attention(weights.norm(f"{name}_ln"), qkv, weights.linear(f"{name}.out"))


def _mlp(weights: Weights, block: str) -> _Mlp:
    return _Mlp(weights.norm(f"{block}.mlp_ln"), weights.linear(f"{block}.mlp1"), weights.linear(f"{block}.mlp2"))


def _decoder_layer(weights: Weights, block: str) -> _DecoderLayer:
    return _DecoderLayer(
        _attention(weights, f"{block}.attn"),
        weights.norm(f"{block}.cross_attn_ln"),
        weights.linear(f"{block}.cross_attn.query"),
        weights.linear(f"{block}.cross_attn.key", f"{block}.cross_attn.value"),
        weights.linear(f"{block}.cross_attn.out"),
        _mlp(weights, block),
    )
