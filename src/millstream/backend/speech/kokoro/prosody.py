"""From phonemes to durations, pitch and energy: ALBERT, text encoder and prosody predictor. Owner only."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from millstream.backend.speech.kokoro.layers import NORM_EPS, Convolution, Linear, Lstm, StyledBlock, leaky
from millstream.backend.speech.kokoro.rows import Rows
from millstream.backend.speech.kokoro.tensors import Tensors
from millstream.models.kokoro_config import KokoroConfig

ALBERT_EPS = 1e-12


class Albert:
    """BERT whose layers share their weights."""

    def __init__(self, tensors: Tensors, config: KokoroConfig) -> None:
        self._layers = config.albert_layers
        self._heads = config.albert_heads
        embeddings = "bert.embeddings"
        self._words = tensors.tensor(f"{embeddings}.word_embeddings.weight")
        self.vocab_size = len(self._words)
        types = tensors.plain(f"{embeddings}.token_type_embeddings.weight")
        positions = tensors.plain(f"{embeddings}.position_embeddings.weight")
        self._positions = tensors.keep(positions + types[0])
        self._norm = _norm(tensors, f"{embeddings}.LayerNorm")
        self._widen = Linear.of(tensors, "bert.encoder.embedding_hidden_mapping_in")
        layer = "bert.encoder.albert_layer_groups.0.albert_layers.0"
        parts = [f"{layer}.attention.{part}" for part in ("query", "key", "value")]
        self._qkv = Linear(
            tensors.keep(mx.concatenate([tensors.plain(f"{part}.weight").T for part in parts], axis=1)),
            tensors.keep(mx.concatenate([tensors.plain(f"{part}.bias") for part in parts])),
        )
        self._out = Linear.of(tensors, f"{layer}.attention.dense")
        self._norm1 = _norm(tensors, f"{layer}.attention.LayerNorm")
        self._up = Linear.of(tensors, f"{layer}.ffn")
        self._down = Linear.of(tensors, f"{layer}.ffn_output")
        self._norm2 = _norm(tensors, f"{layer}.full_layer_layer_norm")

    def __call__(self, tokens: mx.array, rows: Rows) -> mx.array:
        x = self._words[tokens] + self._positions[: tokens.shape[1]]
        x = self._widen(mx.fast.layer_norm(x, *self._norm, ALBERT_EPS))
        mask = None if rows.keep is None else rows.keep.transpose(0, 2, 1)[:, None]
        for _ in range(self._layers):
            x = mx.fast.layer_norm(x + self._out(self._attend(x, mask)), *self._norm1, ALBERT_EPS)
            x = mx.fast.layer_norm(x + self._down(nn.gelu_approx(self._up(x))), *self._norm2, ALBERT_EPS)
        return x

    def _attend(self, x: mx.array, mask: mx.array | None) -> mx.array:
        rows, length, width = x.shape
        size = width // self._heads
        queries, keys, values = (
            part.reshape(rows, length, self._heads, size).transpose(0, 2, 1, 3)
            for part in mx.split(self._qkv(x), 3, axis=-1)
        )
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=size**-0.5, mask=mask)
        return attended.transpose(0, 2, 1, 3).reshape(rows, length, width)


class TextEncoder:
    def __init__(self, tensors: Tensors, config: KokoroConfig) -> None:
        self._embedding = tensors.tensor("text_encoder.embedding.weight")
        self.vocab_size = len(self._embedding)
        self._convolutions = [
            (
                Convolution.of(tensors, f"text_encoder.cnn.{layer}.0", config.text_kernel),
                tensors.tensor(f"text_encoder.cnn.{layer}.1.gamma"),
                tensors.tensor(f"text_encoder.cnn.{layer}.1.beta"),
            )
            for layer in range(config.layers)
        ]
        self._lstm = Lstm(tensors, "text_encoder.lstm")

    def __call__(self, tokens: mx.array, rows: Rows) -> mx.array:
        x = rows.mask(self._embedding[tokens])
        for convolution, gamma, beta in self._convolutions:
            x = rows.mask(leaky(mx.fast.layer_norm(convolution(x), gamma, beta, NORM_EPS), 0.2))
        return self._lstm(x, rows)


class Prosody:
    """Durations of phonemes, then pitch and energy of frames."""

    def __init__(self, tensors: Tensors, config: KokoroConfig) -> None:
        encoder = "predictor.text_encoder.lstms"
        self._project = Linear.of(tensors, "bert_encoder")
        self._encoder = [
            (Lstm(tensors, f"{encoder}.{2 * layer}"), Linear.of(tensors, f"{encoder}.{2 * layer + 1}.fc"))
            for layer in range(config.layers)
        ]
        self._lstm = Lstm(tensors, "predictor.lstm")
        self._durations = Linear.of(tensors, "predictor.duration_proj.linear_layer")
        self._shared = Lstm(tensors, "predictor.shared")
        self._curves = [
            (
                [StyledBlock.of(tensors, f"predictor.{name}.{block}") for block in range(3)],
                tensors.keep(tensors.convolution(f"predictor.{name}_proj", 1)[..., 0].T, mx.float32),
                tensors.keep(tensors.plain(f"predictor.{name}_proj.bias"), mx.float32),
            )
            for name in ("F0", "N")
        ]

    def encode(self, hidden: mx.array, style: mx.array, rows: Rows) -> mx.array:
        """ALBERT's hidden states, with the style, as input for durations and curves."""
        x = self._project(hidden)
        styles = mx.broadcast_to(style[:, None], (*x.shape[:2], style.shape[-1]))
        x = rows.mask(mx.concatenate([x, styles], axis=-1))
        for lstm, norm in self._encoder:
            gamma, beta = mx.split(norm(style)[:, None], 2, axis=-1)
            x = (1 + gamma) * mx.fast.layer_norm(lstm(x, rows), None, None, NORM_EPS) + beta
            x = rows.mask(mx.concatenate([x, styles], axis=-1))
        return x

    def durations(self, encoded: mx.array, rows: Rows) -> mx.array:
        """Frames of each phoneme at normal speed, not rounded."""
        chances = mx.sigmoid(self._durations(self._lstm(encoded, rows)).astype(mx.float32))
        return mx.sum(chances, axis=-1)

    def curves(self, frames: mx.array, style: mx.array, rows: Rows) -> tuple[mx.array, mx.array, Rows]:
        """Pitch in Hz and energy, two of each per frame, and the rows that they have. In float32: half precision would
        round a pitch to whole Hz."""
        shared = self._shared(frames, rows)
        found = []
        ends = rows
        for blocks, weight, bias in self._curves:
            x, ends = shared, rows
            for block in blocks:
                x, ends = block(x, style, ends)
            found.append(ends.mask(mx.addmm(bias, x.astype(mx.float32), weight)))
        return found[0], found[1], ends


def _norm(tensors: Tensors, name: str) -> tuple[mx.array, mx.array]:
    return tensors.tensor(f"{name}.weight"), tensors.tensor(f"{name}.bias")
