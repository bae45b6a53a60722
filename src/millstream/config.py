"""The settings of a server, as plain data. The command line fills them; tests make them by hand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

FAST_PATHS = {
    "fuse": "compute projections of the same input as one product",
    "turn": "ask for the products of few rows as MKL computes them fastest (CPU, x86_64)",
    "slots": "rows join and leave without copying the batch",
    "kernel": "our own kernels for attention over unequal rows and for sampling (CUDA)",
    "group-prefill": "read prompts of like length in one pass",
    "warmup": "compile kernels when a model is loaded, not at the first request (GPU)",
}
"""What `--disable` can turn off, one by one."""


@dataclass(frozen=True, slots=True)
class Settings:
    models: tuple[str, ...] = ()
    """Folders, .gguf files or hub ids. None at all: the demo model."""
    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 32
    queue: int = 256
    fail_fast: bool = False
    prefill_chunk: int | None = None
    """The most tokens of one prompt that a step reads beside running rows. None: 128 on the CPU, 256 on a GPU."""
    body_limit: int = 32 * 2**20
    grace: float = 20.0
    """Seconds that running requests get to finish after SIGTERM."""
    stop_patience: float = 30.0
    """Seconds that engines then get to end their step and free their models."""
    device: str | None = None
    """`cpu` to keep off the GPU; None for MLX's own choice."""
    isolation: str = "auto"
    """`thread`: engines run in this process. `process`: each in a child of its own. `auto`: see `isolated`."""
    blas: bool = True
    unpack: bool = True
    disabled: frozenset[str] = frozenset()
    """Fast paths to leave out."""
    cache_dir: Path | None = None

    @property
    def isolated(self) -> bool:
        """Whether engines run in processes of their own. With cores to spare, that keeps HTTP work and an engine from
        fighting for one interpreter; on one or two cores there is nothing to win."""
        if self.isolation == "auto":
            return (os.cpu_count() or 1) > 2
        return self.isolation == "process"
