"""Converts MLX arrays to plain tensors and back. Owner only."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from millstream.types import Tensor

_AS_BITS = {mx.bfloat16: mx.uint16}
"""Types that NumPy lacks are carried as integers of the same size."""


def to_tensor(array: mx.array) -> Tensor:
    """Wait for the array and copy it."""
    bits = array.view(_AS_BITS[array.dtype]) if array.dtype in _AS_BITS else array
    return Tensor(str(array.dtype).removeprefix("mlx.core."), tuple(array.shape), np.asarray(bits).tobytes())


def to_array(tensor: Tensor) -> mx.array:
    """Copy into a new array, which is still lazy if NumPy lacks its type."""
    dtype: mx.Dtype = getattr(mx, tensor.dtype)
    bits = _AS_BITS.get(dtype, dtype)
    plain = np.frombuffer(tensor.data, dtype=str(bits).removeprefix("mlx.core.")).reshape(tensor.shape)
    array = mx.array(plain)
    return array.view(dtype) if bits is not dtype else array
