"""Resolves the settings of one engine from those of the server and the model.

They are sent to the engine's process. The server's other settings, such as API keys, never are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from millstream.config import NO_DRAFT, ModelSpec, Settings
from millstream.models.demo import user_cache_dir
from millstream.models.source import ModelSource

FEATURE_BYTES = 256 * 2**20
"""Default size of the cache of encoded media: a follow-up question about an image does not encode it again."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of a backend, besides the model's files."""

    max_batch: int = 32
    device: str | None = None
    """`cpu` to avoid the GPU; None for MLX's default."""
    blas: bool = True
    shares_cores: bool = False
    """True if other engines use the CPU as well."""
    yields: bool = False
    """True if the engine has a process of its own, which leaves the cores to other engines where they are short."""
    unpack: bool = True
    disabled: frozenset[str] = frozenset()
    """Fast paths to leave out: see `config.FAST_PATHS`."""
    layout: str = "auto"
    """One of `config.LAYOUTS`."""
    kv_bits: int = 0
    cache_limit: int | None = None
    """Bytes of freed memory that MLX may hold for reuse. None for MLX's default."""
    feature_bytes: int = FEATURE_BYTES
    """Size of the cache of encoded media."""
    speculation: bool = True
    """False: no drafts at all."""
    draft: ModelSource | None = None
    """Its draft model, on the same engine."""
    draft_depth: int | None = None
    spec_prefill: float = 1.0
    """The share of long prompts that is read, and how long such a prompt is."""
    spec_prefill_tokens: int = 4096
    kernel_dir: Path | None = None
    """Where compiled CUDA kernels are kept for the next process."""


def engine_settings(settings: Settings, spec: ModelSpec) -> EngineSettings:
    """Returns the settings of a model's engine: the model's own where set, else the server's."""
    memory = settings.memory
    return EngineSettings(
        max_batch=max_batch(settings, spec),
        device=settings.device,
        blas=settings.blas,
        shares_cores=len(settings.specs) > 1,
        unpack=settings.unpack,
        disabled=settings.disabled,
        layout=settings.layout,
        kv_bits=kv_bits(settings, spec),
        cache_limit=None if memory is None else memory // 10,
        feature_bytes=FEATURE_BYTES if memory is None else min(FEATURE_BYTES, memory // 20),
        speculation=speculation(settings, spec) != "off",
        draft_depth=draft_depth(settings, spec),
        spec_prefill=spec_prefill(settings, spec),
        spec_prefill_tokens=settings.spec_prefill_tokens,
        kernel_dir=(settings.cache_dir or user_cache_dir()) / "kernels",
    )


def yielding(settings: Settings, spec: ModelSpec) -> EngineSettings:
    """The same for an engine that runs long batches: a chat beside it is what people see stall."""
    own = engine_settings(settings, spec)
    return replace(own, yields=own.shares_cores and settings.isolated(spec))


def max_batch(settings: Settings, spec: ModelSpec) -> int:
    return spec.max_batch or settings.max_batch


def speculation(settings: Settings, spec: ModelSpec) -> str:
    return spec.speculation or settings.speculation


def draft_of(settings: Settings, spec: ModelSpec) -> str | None:
    """The draft model of a model, as it was named. None if it has none, or nothing to do for it."""
    named = spec.draft or settings.draft
    needed = speculation(settings, spec) != "off" or spec_prefill(settings, spec) < 1
    return None if named == NO_DRAFT or not needed else named


def draft_depth(settings: Settings, spec: ModelSpec) -> int | None:
    return spec.draft_depth or settings.draft_depth


def spec_prefill(settings: Settings, spec: ModelSpec) -> float:
    return settings.spec_prefill if spec.spec_prefill is None else spec.spec_prefill


def kv_bits(settings: Settings, spec: ModelSpec) -> int:
    return settings.kv_bits if spec.kv_bits is None else spec.kv_bits
