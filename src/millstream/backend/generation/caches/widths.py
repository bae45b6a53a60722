"""How many slots a batch keeps, how many rows a pass over them has, and how many tokens one over a prompt."""

from __future__ import annotations

from collections.abc import Callable

from millstream.backend.kernels.small_matmul import WIDTHS

SlotPolicy = Callable[[int], int]
"""How many slots to keep for so many rows, or rows for so many slots."""

FULL = 64
CHUNKS = (64, 128, 256, 512, 1024, 2048)
"""Lengths of a chunk that come again and again."""
PADDED = 512


def exact(rows: int) -> int:
    """For the CPU, where a vacant row costs as much as a living one."""
    return rows


def powers_of_two(rows: int) -> int:
    """For GPUs, where vacant rows are almost free and new shapes are not."""
    return 1 << max(0, rows - 1).bit_length()


def full_width(slots: int) -> int:
    """How many rows a forward pass gets from cuBLAS, whose products of 2 to 32 rows take longer than those of 64 (H200:
    a step of 5.1 ms against 4.0). Rows beyond the slots have no keys and values, so they cost no memory."""
    return FULL if 1 < slots < FULL else slots


def row_width(slots: int) -> int:
    """The same for our own products: a width that they are compiled for."""
    return next((width for width in WIDTHS if slots <= width), slots) if slots else 0


def chunk_length(tokens: int) -> int:
    """How many tokens to read where there are so many: on CUDA the first chunk of a length costs the host 9 ms more
    than the second (H200), and up to 512 tokens the device reads padding almost for nothing."""
    return next(length for length in CHUNKS if tokens <= length) if tokens <= PADDED else tokens
