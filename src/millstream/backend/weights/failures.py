"""What loading a model can raise. Apart from the loaders, which import mlx-lm: encoders of our own do without."""

from __future__ import annotations

LIBRARY_FAILURES = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError, OSError, RuntimeError,
    MemoryError, AssertionError,
)  # fmt: skip
"""What mlx-lm and mlx-vlm raise for files that they cannot load."""
