"""What encoders compute with on x86_64 CPUs, against MLX's own operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from millstream.backend.encoders.backend import EncoderSettings, MlxEncoderBackend
from millstream.backend.encoders.families import operations
from millstream.backend.encoders.families.operations import MKL, MLX
from millstream.backend.layers.vector_math import gelu_in_place, has_mkl, set_vector_threads
from millstream.models.encoder_layout import read_layout
from support.tiny_encoders import write_encoder

pytestmark = pytest.mark.skipif(not has_mkl(), reason="MKL is not installed")

SIZES = [7, 3_000, 300_000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted(MKL.activations))
def test_activations_are_those_of_mlx(name: str, size: int) -> None:
    x = mx.concatenate([mx.linspace(-12, 12, size), mx.array([0.0, -80.0, 80.0])])
    expected = MLX.activations[name](x)
    ours = MKL.activations[name](x * 1)
    assert mx.abs(ours - expected).max().item() < 3e-6


def test_gelu_leaves_alone_what_is_not_its_own() -> None:
    whole = mx.random.normal((40, 64))
    before = np.array(whole)
    left, right = mx.split(whole * 1, 2, axis=-1)
    ours = gelu_in_place(left)
    assert mx.allclose(ours, MLX.activations["gelu"](mx.array(before[:, :32])), atol=1e-6)
    assert np.array_equal(np.array(right), before[:, 32:])
    assert np.array_equal(np.array(whole), before)


def test_vector_functions_get_their_threads_back(tmp_path: Path) -> None:
    """Owner threads are reused by other kinds of engines."""
    before = set_vector_threads(3)
    folder = write_encoder(tmp_path, "bert")
    backend = MlxEncoderBackend(EncoderSettings(folder, read_layout(folder), disabled=frozenset({"calibration"})))
    backend.load()
    during = set_vector_threads(1)
    backend.close()
    assert (during, set_vector_threads(before)) == (1, 3)


def _padding(rows: int, length: int) -> mx.array:
    lengths = mx.array([length - 3 * row for row in range(rows)])
    return (mx.arange(length)[None, :] < lengths[:, None])[:, None, None, :]


MASKS: dict[str, Callable[[int, int], mx.array | None]] = {
    "none": lambda rows, length: None,
    "padding": _padding,
    "window": lambda rows, length: mx.abs(mx.arange(length)[:, None] - mx.arange(length))[None, None] <= 2,
    "added": lambda rows, length: mx.random.normal((1, 2, length, length)),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("length", [12, 90])
def test_attention_is_that_of_mlx(kind: str, length: int) -> None:
    mx.random.seed(length)
    queries, keys, values = mx.random.normal((3, 3, 2, length, 16)) * 3
    keys = keys.at[..., -1, :].multiply(100)  # what padding has must not matter, however large
    mask = MASKS[kind](3, length)
    expected = MLX.attention(queries, keys, values, 0.25, mask)
    ours = MKL.attention(queries, keys, values, 0.25, mask)
    assert mx.abs(ours - expected).max().item() < 2e-5


@pytest.mark.parametrize("rows", [1, 20, 100])
def test_linear_layers_are_those_of_mlx(rows: int) -> None:
    x, weight, bias = mx.random.normal((1, rows, 32)), mx.random.normal((48, 32)), mx.random.normal((48,))
    for each in (None, bias):
        assert mx.allclose(MKL.linear(x, weight, each), MLX.linear(x, weight, each), atol=2e-5)


def test_other_devices_and_those_who_turned_it_off_get_mlxs_own() -> None:
    assert operations.operations(on_cpu=False) is MLX
    assert operations.operations(on_cpu=True, disabled=frozenset({operations.FAST_PATH})) is MLX
