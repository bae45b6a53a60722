"""From frames to sound: the decoder and its iSTFTNet vocoder. Owner only."""

from __future__ import annotations

import math

import mlx.core as mx

from millstream.backend.speech.kokoro.layers import Convolution, SnakeBlock, StyledBlock, Upsampling, leaky
from millstream.backend.speech.kokoro.rows import Rows
from millstream.backend.speech.kokoro.snake import fused_snake
from millstream.backend.speech.kokoro.source import Fourier, HarmonicSource
from millstream.backend.speech.kokoro.tensors import Tensors
from millstream.models.kokoro_config import KokoroConfig


class Decoder:
    def __init__(self, tensors: Tensors, config: KokoroConfig) -> None:
        self._pitch, self._energy = (_Halving(tensors, f"decoder.{name}_conv") for name in ("F0", "N"))
        self._text = Convolution.of(tensors, "decoder.asr_res.0", 1)
        self._encode = StyledBlock.of(tensors, "decoder.encode")
        self._blocks = [StyledBlock.of(tensors, f"decoder.decode.{block}") for block in range(4)]
        self._vocoder = Vocoder(tensors, config)

    def __call__(
        self, text: mx.array, pitch: mx.array, energy: mx.array, style: mx.array, rows: Rows, *, noise: bool = True
    ) -> tuple[mx.array, Rows]:
        """`text`: (rows, frames, channels). Curves have two values per frame. Returns samples in float32."""
        curves = [self._pitch(pitch.astype(text.dtype)), self._energy(energy.astype(text.dtype))]
        shared = [self._text(text), *curves]
        shared = [rows.mask(each) for each in shared]
        x, ends = self._encode(mx.concatenate([text, *shared[1:]], axis=-1), style, rows)
        for block in self._blocks:
            x, ends = block(mx.concatenate([x, *shared], axis=-1), style, rows)
        return self._vocoder(x, pitch, style, ends, noise=noise)


class _Halving:
    """A convolution of one channel with kernel 3 and stride 2."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        self._weight = tensors.keep(tensors.convolution(name, 3).reshape(3))
        self._bias = tensors.tensor(f"{name}.bias")

    def __call__(self, x: mx.array) -> mx.array:
        even, odd = x[:, ::2], x[:, 1::2]
        before = mx.pad(odd[:, :-1], [(0, 0), (1, 0), (0, 0)])
        return before * self._weight[0] + even * self._weight[1] + odd * self._weight[2] + self._bias


class Vocoder:
    """Upsamples in stages. To each stage it adds the harmonic source, then writes magnitudes and phases."""

    def __init__(self, tensors: Tensors, config: KokoroConfig) -> None:
        generator = "decoder.generator"
        self._source = HarmonicSource(tensors, math.prod(config.upsample_rates) * config.hop)
        self._fourier = Fourier(config.n_fft, config.hop)
        tensors.used.extend(self._fourier.arrays)
        snake = fused_snake(tensors.dtype)
        self._stages = []
        per_stage = len(config.kernels)
        last = len(config.upsample_rates) - 1
        for stage, rate in enumerate(config.upsample_rates):
            stride = math.prod(config.upsample_rates[stage + 1 :])
            first = stage * per_stage
            self._stages.append((
                Upsampling.of(tensors, f"{generator}.ups.{stage}", rate),
                _SourceConvolution(tensors, f"{generator}.noise_convs.{stage}", stride),
                SnakeBlock.of(
                    tensors, f"{generator}.noise_res.{stage}", 11 if stage == last else 7, config.dilations[0], snake
                ),
                [
                    SnakeBlock.of(tensors, f"{generator}.resblocks.{first + number}", kernel, dilations, snake)
                    for number, (kernel, dilations) in enumerate(zip(config.kernels, config.dilations, strict=True))
                ],
            ))  # fmt: skip
        self._last = Convolution.of(tensors, f"{generator}.conv_post", 7)
        self._bins = config.n_fft // 2 + 1
        self._hop = config.hop
        self._rates = config.upsample_rates

    def __call__(
        self, x: mx.array, pitch: mx.array, style: mx.array, rows: Rows, *, noise: bool
    ) -> tuple[mx.array, Rows]:
        samples = rows.scaled(math.prod(self._rates) * self._hop)
        signal = self._source(pitch, rows, noise=noise)
        source = self._fourier.transform(signal, samples).astype(x.dtype)
        frames = rows.scaled(math.prod(self._rates), 1)
        source = frames.mask(source)
        for number, (upsample, narrow, source_block, blocks) in enumerate(self._stages):
            x = upsample(leaky(x, 0.1))
            rows = rows.scaled(self._rates[number])
            if number == len(self._stages) - 1:
                x = mx.concatenate([x[:, 1:2], x], axis=1)  # reflected
                rows = frames
            added = source_block(rows.mask(narrow(source)), style, rows)
            x = rows.mask(x) + added
            x = sum((block(x, style, rows) for block in blocks[1:]), blocks[0](x, style, rows)) / len(blocks)
        written = self._last(leaky(x, 0.01)).astype(mx.float32)
        magnitude, phase = mx.exp(written[..., : self._bins]), mx.sin(written[..., self._bins :])
        return self._fourier.inverse(magnitude, phase, rows), samples


class _SourceConvolution:
    """A convolution with a kernel of twice its stride, as two matmuls; with stride 1, a linear layer."""

    def __init__(self, tensors: Tensors, name: str, stride: int) -> None:
        self._stride = stride
        kernel = 1 if stride == 1 else 2 * stride
        weight = tensors.convolution(name, kernel).transpose(2, 1, 0)  # (kernel, inputs, outputs)
        halves = [weight] if stride == 1 else mx.split(weight, 2)
        self._weights = [tensors.keep(half.reshape(-1, half.shape[-1])) for half in halves]
        self._bias = tensors.tensor(f"{name}.bias")

    def __call__(self, x: mx.array) -> mx.array:
        if self._stride == 1:
            return mx.addmm(self._bias, x, self._weights[0])
        count, length, channels = x.shape
        left = (self._stride + 1) // 2
        blocks = (length - 1) // self._stride + 1
        total = blocks * self._stride
        padded = mx.pad(x, [(0, 0), (left, max(0, total - left - length)), (0, 0)])[:, :total]
        framed = padded.reshape(count, blocks, self._stride * channels)
        return mx.addmm(mx.addmm(self._bias, framed[:, :-1], self._weights[0]), framed[:, 1:], self._weights[1])
