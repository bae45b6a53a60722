"""Creates backends. Called on the owner thread, which imports MLX and creates its stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from millstream.backend.environment import avoid_cudnn_attention, load_blas, share_cores
from millstream.backend.open_files import preserve_open_files
from millstream.engine.generation.plan import GenerationBackend
from millstream.engine.protocols import Backend
from millstream.loading.settings import EngineSettings
from millstream.models.source import ModelSource
from millstream.text.grammars.grammar import compiler_of

BackendMaker = Callable[[ModelSource, EngineSettings], Backend[Any, Any, Any, Any]]


def generation_backend(source: ModelSource, settings: EngineSettings) -> GenerationBackend:
    """Creates the MLX backend of a text generation model."""
    if settings.shares_cores:
        share_cores()
    blas = load_blas(settings.blas)
    avoid_cudnn_attention()
    with preserve_open_files():
        from millstream.backend import mlx_lm_import  # noqa: F401  before all that imports mlx-lm
        from millstream.backend.device import use_device
        from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend

    use_device(settings.device)
    return MlxGenerationBackend(
        GenerationSettings(
            source.kind,
            Path(source.path),
            max_rows=settings.max_batch,
            unpack=settings.unpack,
            disabled=settings.disabled,
            blas=blas,
            kv_bits=settings.kv_bits,
            cache_limit=settings.cache_limit,
            grammars=compiler_of(source),
            feature_bytes=settings.feature_bytes,
        )
    )
