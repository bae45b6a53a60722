"""The settings of a server, as plain data. The command line fills them; tests make them by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    """Prompt tokens a step, beside running rows. None: 128 on the CPU, 512 on a GPU."""
    body_limit: int = 32 * 2**20
    grace: float = 20.0
    """Seconds that running requests get to finish after SIGTERM."""
    stop_patience: float = 30.0
    """Seconds that engines then get to end their step and free their models."""
    device: str | None = None
    """`cpu` to keep off the GPU; None for MLX's own choice."""
    blas: bool = True
    unpack: bool = True
    cache_dir: Path | None = None
