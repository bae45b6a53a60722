"""Layers of Kokoro, as few and large matmuls: MLX's dilated and transposed convolutions are slow on CPUs. Owner only.

Arrays are (rows, positions, channels).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from millstream.backend.speech.kokoro.rows import Rows
from millstream.backend.speech.kokoro.snake import Snake
from millstream.backend.speech.kokoro.tensors import Tensors

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Linear:
    weight: mx.array
    """(inputs, outputs)."""
    bias: mx.array

    @classmethod
    def of(cls, tensors: Tensors, name: str) -> Linear:
        return cls(tensors.keep(tensors.plain(f"{name}.weight").T), tensors.tensor(f"{name}.bias"))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution that keeps the length, as one matmul for each tap of its kernel."""

    weight: mx.array
    """(kernel, inputs, outputs)."""
    bias: mx.array | None
    dilation: int = 1

    @classmethod
    def of(
        cls, tensors: Tensors, name: str, kernel: int, dilation: int = 1, input_scale: mx.array | None = None
    ) -> Convolution:
        weight = tensors.convolution(name, kernel).transpose(2, 1, 0)
        if input_scale is not None:
            weight = weight * input_scale.reshape(1, -1, 1)
        bias = tensors.tensor(f"{name}.bias") if tensors.has(f"{name}.bias") else None
        return cls(tensors.keep(weight), bias, dilation)

    def __call__(self, x: mx.array) -> mx.array:
        kernel, length = self.weight.shape[0], x.shape[1]
        side = (kernel - 1) // 2 * self.dilation
        padded = x if side == 0 else mx.pad(x, [(0, 0), (side, side), (0, 0)])
        total = self.bias
        for tap in range(kernel):
            start = tap * self.dilation
            shifted = padded[:, start : start + length]
            weight = self.weight[tap]
            total = shifted @ weight if total is None else mx.addmm(total, shifted, weight)
        assert total is not None
        return total


@dataclass(frozen=True, slots=True)
class Upsampling:
    """A transposed convolution with a kernel of twice its stride, as one matmul and the sum of its overlapping halves.
    A row becomes `stride` times as long."""

    weight: mx.array
    """(inputs, 2 * stride * outputs)."""
    bias: mx.array
    stride: int

    @classmethod
    def of(cls, tensors: Tensors, name: str, stride: int) -> Upsampling:
        weight = tensors.convolution(name, 2 * stride)  # (inputs, outputs, kernel)
        weight = weight.transpose(0, 2, 1).reshape(weight.shape[0], -1)
        return cls(tensors.keep(weight), tensors.tensor(f"{name}.bias"), stride)

    def __call__(self, x: mx.array) -> mx.array:
        rows, length, _ = x.shape
        parts = (x @ self.weight).reshape(rows, length, 2, self.stride, -1)
        first = mx.pad(parts[:, :, 0], [(0, 0), (0, 1), (0, 0), (0, 0)])
        second = mx.pad(parts[:, :, 1], [(0, 0), (1, 0), (0, 0), (0, 0)])
        both = (first + second).reshape(rows, (length + 1) * self.stride, -1)
        start = self.stride // 2
        return both[:, start : start + length * self.stride] + self.bias


@dataclass(frozen=True, slots=True)
class AdaptiveNorm:
    """Instance normalisation whose scale and shift come from the style."""

    style: Linear

    @classmethod
    def of(cls, tensors: Tensors, name: str) -> AdaptiveNorm:
        return cls(Linear.of(tensors, f"{name}.fc"))

    def affine(self, x: mx.array, style: mx.array, rows: Rows) -> tuple[mx.array, mx.array]:
        """What to multiply `x` with and to add to it, in float32: the normalisation and the style in one."""
        mean, variance = rows.moments(x)
        gamma, beta = mx.split(self.style(style).astype(mx.float32)[:, None], 2, axis=-1)
        scale = (1 + gamma) * mx.rsqrt(variance + NORM_EPS)
        return scale, beta - mean * scale


@dataclass(frozen=True, slots=True)
class SnakeBlock:
    """Three residual pairs of dilated convolutions with snake activations, x + sin²(a x) / a.

    With u = a x, the activation is (u + sin² u) / a: `a` is folded into the normalisation before it, and 1 / a into the
    weights after it.
    """

    pairs: tuple[tuple[AdaptiveNorm, mx.array, Convolution, AdaptiveNorm, mx.array, Convolution], ...]
    snake: Snake

    @classmethod
    def of(cls, tensors: Tensors, name: str, kernel: int, dilations: tuple[int, ...], snake: Snake) -> SnakeBlock:
        def half(part: int, index: int, dilation: int) -> tuple[AdaptiveNorm, mx.array, Convolution]:
            alpha = tensors.plain(f"{name}.alpha{part}.{index}").reshape(1, 1, -1)
            return (
                AdaptiveNorm.of(tensors, f"{name}.adain{part}.{index}"),
                tensors.keep(alpha, mx.float32),
                Convolution.of(tensors, f"{name}.convs{part}.{index}", kernel, dilation, 1 / alpha),
            )

        pairs = tuple((*half(1, index, dilation), *half(2, index, 1)) for index, dilation in enumerate(dilations))
        return cls(pairs, snake)

    def __call__(self, x: mx.array, style: mx.array, rows: Rows) -> mx.array:
        for norm1, alpha1, conv1, norm2, alpha2, conv2 in self.pairs:
            y = conv1(self._activate(x, norm1, alpha1, style, rows))
            y = conv2(self._activate(rows.mask(y), norm2, alpha2, style, rows))
            x = rows.mask(x + y)
        return x

    def _activate(self, x: mx.array, norm: AdaptiveNorm, alpha: mx.array, style: mx.array, rows: Rows) -> mx.array:
        scale, shift = norm.affine(x, style, rows)
        return rows.mask(self.snake(x, scale * alpha, shift * alpha))


@dataclass(frozen=True, slots=True)
class StyledBlock:
    """Two convolutions with adaptive norms beside a shortcut; with `pool`, it doubles the length of a row."""

    norm1: AdaptiveNorm
    conv1: Convolution
    norm2: AdaptiveNorm
    conv2: Convolution
    shortcut: Convolution | None
    pool: tuple[mx.array, mx.array] | None
    """Weight (kernel, channels) and bias of a transposed convolution of each channel by itself."""

    @classmethod
    def of(cls, tensors: Tensors, name: str) -> StyledBlock:
        pool = None
        if tensors.has(f"{name}.pool.bias"):
            weight = tensors.convolution(f"{name}.pool", 3)[:, 0].T
            pool = (tensors.keep(weight), tensors.tensor(f"{name}.pool.bias"))
        learned = tensors.has(f"{name}.conv1x1.weight_v") or tensors.has(f"{name}.conv1x1.weight")
        return cls(
            AdaptiveNorm.of(tensors, f"{name}.norm1"),
            Convolution.of(tensors, f"{name}.conv1", 3),
            AdaptiveNorm.of(tensors, f"{name}.norm2"),
            Convolution.of(tensors, f"{name}.conv2", 3),
            Convolution.of(tensors, f"{name}.conv1x1", 1) if learned else None,
            pool,
        )

    def __call__(self, x: mx.array, style: mx.array, rows: Rows) -> tuple[mx.array, Rows]:
        y = _leaky_norm(x, self.norm1, style, rows)
        straight = x if self.shortcut is None else self.shortcut(x)
        if self.pool is not None:
            y = _doubled(y, *self.pool)
            straight = mx.repeat(straight, 2, axis=1)
            rows = rows.scaled(2)
            y = rows.mask(y)
        y = rows.mask(self.conv1(y))
        y = self.conv2(_leaky_norm(y, self.norm2, style, rows))
        return rows.mask((y + straight) * (0.5**0.5)), rows


def _leaky_norm(x: mx.array, norm: AdaptiveNorm, style: mx.array, rows: Rows) -> mx.array:
    scale, shift = norm.affine(x, style, rows)
    return rows.mask(leaky(x * scale.astype(x.dtype) + shift.astype(x.dtype), 0.2))


def _doubled(x: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
    """A transposed convolution with kernel 3, stride 2, padding 1 and output padding 1."""
    rows, length, channels = x.shape
    after = mx.pad(x[:, 1:], [(0, 0), (0, 1), (0, 0)])
    pairs = mx.stack([x * weight[1], x * weight[2] + after * weight[0]], axis=2)
    return pairs.reshape(rows, 2 * length, channels) + bias


def leaky(x: mx.array, slope: float) -> mx.array:
    return mx.maximum(x, slope * x)


class Lstm:
    """In both directions at once: each step is one small batched matmul."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        ends = ("_l0", "_l0_reverse")
        self._inputs = [tensors.keep(tensors.plain(f"{name}.weight_ih{end}").T) for end in ends]
        self._biases = [
            tensors.keep(tensors.plain(f"{name}.bias_ih{end}") + tensors.plain(f"{name}.bias_hh{end}")) for end in ends
        ]
        self._hidden = tensors.keep(mx.stack([tensors.plain(f"{name}.weight_hh{end}").T for end in ends]))

    def __call__(self, x: mx.array, rows: Rows) -> mx.array:
        count, length, _ = x.shape
        width = self._hidden.shape[1]
        ahead, back = (mx.addmm(bias, x, weight) for weight, bias in zip(self._inputs, self._biases, strict=True))
        gates = mx.stack([ahead, back[:, ::-1]]).transpose(2, 0, 1, 3)  # (positions, directions, rows, gates)
        keep = rows.keep
        if keep is not None:
            alive = mx.stack([keep, keep[:, ::-1]]).transpose(2, 0, 1, 3)
        hidden = cell = mx.zeros((2, count, width), x.dtype)
        outputs = []
        for step in range(length):
            hidden, cell = _lstm_step(gates[step] + hidden @ self._hidden, cell)
            if keep is not None:  # the backward direction begins at the end of each row
                hidden, cell = mx.where(alive[step], hidden, 0), mx.where(alive[step], cell, 0)
            outputs.append(hidden)
        joined = mx.stack(outputs)  # (positions, directions, rows, width)
        both = mx.concatenate([joined[:, 0], joined[::-1, 1]], axis=-1)
        return both.transpose(1, 0, 2)


def _lstm_step(gates: mx.array, cell: mx.array) -> tuple[mx.array, mx.array]:
    enter, forget, new, out = mx.split(gates, 4, axis=-1)
    cell = mx.sigmoid(forget) * cell + mx.sigmoid(enter) * mx.tanh(new)
    return mx.sigmoid(out) * mx.tanh(cell), cell
