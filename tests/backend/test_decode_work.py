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
def test_parts_cover_a_slot_and_begin_at_the_same_columns_in_every_slot(capacity: int, span: int) -> None:
    parts = spans(capacity, span)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == capacity
    assert {stop - start for start, stop in parts[:-1]} <= {span}
    assert parts[-1][1] - parts[-1][0] <= span
    longer = spans(2 * capacity + 32, span)
    assert longer[: len(parts) - 1] == parts[:-1]
    assert longer[len(parts) - 1][0] == parts[-1][0]


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
