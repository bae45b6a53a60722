"""Work items of decode attention: how rows are split, and what NumPy, in the kernel's place, makes of them."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from millstream.backend.device import current_device
from millstream.backend.kernels.decode_attention import spans
from support.decode_cases import CASES, DecodeRun
from support.pointer_kernels import PointerKernels


@pytest.mark.parametrize("capacity", [1, 32, 256, 544, 768, 1056, 2048, 10240, 131072])
@pytest.mark.parametrize("span", [128, 512])
def test_parts_cover_a_slot_and_are_of_one_size(capacity: int, span: int) -> None:
    parts = spans(capacity, span)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == capacity
    assert len({stop - start for start, stop in parts[:-1]}) <= 1
    assert all(stop - start <= max(2 * span, capacity / 2) for start, stop in parts)
    assert len(parts) == 1 or capacity > span


@pytest.mark.skipif(current_device().kind != "cpu", reason="NumPy reads the memory of arrays: needs MLX's CPU device")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("name", CASES)
def test_numpy_in_the_kernels_place_follows_the_formula(name: str, dtype: mx.Dtype) -> None:
    mx.random.seed(2)
    kernels = PointerKernels()
    run = DecodeRun(replace(CASES[name], dtype=dtype), kernels.addresses_of)
    expected = run.expected()
    mx.eval(expected)
    out = run.run(kernels.decode)
    assert mx.abs(out.astype(mx.float32) - expected).max().item() < (2e-5 if dtype == mx.float32 else 5e-3)
    assert run.wrong_columns() == 0
