"""The settings of one engine: resolved, plain, and only what it needs.

They cross to the engine's process. The server's other settings, such as API keys, never do.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.config import ModelSpec, Settings

FEATURE_BYTES = 256 * 2**20
"""For encoded media, each kept for the next question about it."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a backend is made from, besides the files of its model."""

    max_batch: int = 32
    device: str | None = None
    """`cpu` to keep off the GPU; None for MLX's own choice."""
    blas: bool = True
    shares_cores: bool = False
    """True if other engines use the CPU as well."""
    unpack: bool = True
    disabled: frozenset[str] = frozenset()
    """Fast paths to leave out: see `config.FAST_PATHS`."""
    kv_bits: int = 0
    cache_limit: int | None = None
    """Bytes of freed memory that MLX may keep for later. None: as many as MLX likes."""
    feature_bytes: int = FEATURE_BYTES
    """Bytes for encoded media that are kept for later requests."""


def engine_settings(settings: Settings, spec: ModelSpec) -> EngineSettings:
    """The model's own settings where it has any, else the server's."""
    memory = settings.memory
    return EngineSettings(
        max_batch=max_batch(settings, spec),
        device=settings.device,
        blas=settings.blas,
        shares_cores=len(settings.specs) > 1,
        unpack=settings.unpack,
        disabled=settings.disabled,
        kv_bits=kv_bits(settings, spec),
        cache_limit=None if memory is None else memory // 10,
        feature_bytes=FEATURE_BYTES if memory is None else min(FEATURE_BYTES, memory // 20),
    )


def max_batch(settings: Settings, spec: ModelSpec) -> int:
    return spec.max_batch or settings.max_batch


def kv_bits(settings: Settings, spec: ModelSpec) -> int:
    return settings.kv_bits if spec.kv_bits is None else spec.kv_bits
