"""Sizes that a step is padded to: slots per batch, rows per forward pass, tokens per prefill chunk."""

from __future__ import annotations

from collections.abc import Callable

from millstream.backend.kernels.small_matmul import STEP_WIDTHS

SlotPolicy = Callable[[int], int]
"""Returns how many slots to allocate for some rows, or how many rows a forward pass has for some slots."""

CHUNK_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""The usual lengths of a prefill chunk: padding goes up to one of the first four, warm-up runs all that fit."""
MAX_PADDED_CHUNK = 512


def exact(rows: int) -> int:
    """For the CPU, where a vacant row costs as much as a decoding one."""
    return rows


def eighths(rows: int) -> int:
    """For GPUs by MLX's own operations: few shapes, and at most an eighth more rows than decode."""
    step = max(1, powers_of_two(rows) // 16)
    return -(-rows // step) * step


def powers_of_two(rows: int) -> int:
    """For our kernels, where vacant rows are almost free and new shapes are not."""
    return 1 << max(0, rows - 1).bit_length()


def kernel_width(slots: int) -> int:
    """Rows per forward pass for our own matmuls: a width that they are compiled for, or whole bands of the last one."""
    if slots > STEP_WIDTHS[-1]:
        return -(-slots // STEP_WIDTHS[-1]) * STEP_WIDTHS[-1]
    return next(width for width in STEP_WIDTHS if slots <= width) if slots else 0


def padded_chunk_length(tokens: int) -> int:
    """The length that a chunk is padded to. On CUDA the first chunk of a length costs the host 9 ms more than the
    second (H200), and up to 512 tokens the device computes padding almost for free."""
    return next(length for length in CHUNK_LENGTHS if tokens <= length) if tokens <= MAX_PADDED_CHUNK else tokens


def padded_group(prompts: int) -> int:
    """Rows of a padded pass for so many prompts: a power of two, or one and a half times one. All arrays of a pass of
    another shape are of new sizes, which CUDA allocates one by one (H200: 200 times 25 to 120 us), so there are few,
    and a load runs those that are usual."""
    power = 1 << max(0, prompts - 1).bit_length()
    return power * 3 // 4 if power >= 4 and prompts <= power * 3 // 4 else power


def flat_length(tokens: int) -> int:
    """The length of a flat pass for so many tokens: there are few, since each is traced once, and beyond 1,024 tokens
    an eighth of them is padding at most."""
    if tokens <= 64:
        return 64
    step = max(128, 1 << ((tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step
