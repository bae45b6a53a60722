"""The short convolution: the sources of its CUDA kernels, on the CPU, against MLX's operations."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from millstream.backend.kernels import short_conv
from millstream.backend.layers import state_ops
from support.cuda_on_host import compile_for_host, missing_compiler

pytestmark = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

CHANNELS = 40
LENGTHS = (5, 1, 2, 9)
"""Of prompts that stand one after the other; the first ones are shorter than a state, or as long."""
TYPES = {mx.float32: "float", mx.int32: "int"}


class HostKernel:
    """What `cuda_kernel` gives, for float32."""

    def __init__(self, *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str) -> None:
        self._inputs, self._outputs, self._source = input_names, output_names, source

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]],
    ) -> list[mx.array]:
        names = [*self._inputs, *self._outputs]
        given = [np.ascontiguousarray(np.array(each)) for each in inputs]
        outs = [np.full(shape, np.nan, dtype=np.float32) for shape in output_shapes]
        kinds = [*(f"const {TYPES[each.dtype]}*" for each in inputs), *("float*" for _ in outs)]
        shapes = [each.shape for each in (*given, *outs)]
        library = _compiled(
            self._source,
            tuple(zip(names, kinds, shapes, strict=True)),
            tuple((key, value) for key, value in template if isinstance(value, int)),
            threadgroup[0],
        )
        library.run(*(each.ctypes.data_as(ctypes.c_void_p) for each in (*given, *outs)), grid[0] // threadgroup[0])
        return [mx.array(each) for each in outs]


@functools.cache
def _compiled(source: str, arrays: tuple[tuple[str, str, Any], ...], constants: Any, threads: int) -> Any:
    text = f"using T = float;\nstatic Index blockDim = {{{threads}, 1, 1}};\n"
    text += "".join(f"constexpr int {name} = {value};\n" for name, value in constants)
    for name, kind, shape in arrays:
        text += f"static {kind} {name};\nstatic const int {name}_shape[] = {{{', '.join(map(str, shape))}}};\n"
    text += f"static void kernel() {{\n{source}\n}}\n"
    text += f'extern "C" void run({", ".join(f"{kind} {name}_" for name, kind, _ in arrays)}, int blocks) {{\n'
    text += "".join(f"  {name} = {name}_;\n" for name, _, _ in arrays)
    text += "  for (int block = 0; block < blocks; block++) run_block(block, kernel);\n}\n"
    with tempfile.TemporaryDirectory() as folder:
        return compile_for_host(text, Path(folder), block_size=threads)


@pytest.fixture(autouse=True)
def _on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_conv, "cuda_kernel", HostKernel)
    for name in ("_kernel", "_steps_kernel", "_prompts_kernel"):
        monkeypatch.setattr(short_conv, name, functools.cache(getattr(short_conv, name).__wrapped__))


def random(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def close(one: mx.array, other: mx.array) -> bool:
    return one.shape == other.shape and bool(mx.allclose(one, other, rtol=1e-5, atol=1e-6).item())


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_a_step(taps: int) -> None:
    given = random(1, 6, 1, 3 * CHANNELS), random(2, 6, taps - 1, CHANNELS), random(3, CHANNELS, taps, 1)
    assert all(map(close, state_ops.BY_MLX.short_conv(*given), state_ops.BY_KERNELS.short_conv(*given)))


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_several_tokens_per_row(taps: int) -> None:
    given = random(1, 8, 1, 3 * CHANNELS), random(2, 2, taps - 1, CHANNELS), random(3, CHANNELS, taps, 1)
    assert all(
        map(close, state_ops.BY_MLX.short_conv_steps(*given, 3), state_ops.BY_KERNELS.short_conv_steps(*given, 3))
    )


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_prompts_have_the_numbers_of_their_steps(taps: int) -> None:
    """Bitwise, from a state of zeros each: nothing of the prompt before."""
    weight, total = random(3, CHANNELS, taps, 1), sum(LENGTHS)
    projected = random(1, total + 3, 1, 3 * CHANNELS)
    positions = mx.array([*(at for length in LENGTHS for at in range(length)), -1, -1, -1], dtype=mx.int32)
    out, columns = short_conv.short_conv_prompts(projected, positions, weight)
    expected = state_ops.BY_MLX.short_conv_prompts(projected, positions, weight)
    assert close(out[:total], expected[0][:total]) and close(columns, expected[1])
    assert not columns[: taps - 1].any().item()
    first = 0
    for length in LENGTHS:
        state = mx.zeros((1, taps - 1, CHANNELS))
        for token in range(first, first + length):
            step, state = short_conv.short_conv(projected[token : token + 1], state, weight)
            assert mx.array_equal(step, out[token : token + 1]).item(), (length, token - first)
        kept = min(length, taps - 1)
        assert mx.array_equal(state[0, taps - 1 - kept :], columns[taps - 1 + first + length - kept :][:kept]).item()
        first += length
