"""Creates backends. Called on the owner thread, which imports MLX and creates its stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from millstream.backend.environment import (
    avoid_cudnn_attention,
    commit_large_graphs,
    load_blas,
    share_cores,
    yield_to_others,
)
from millstream.backend.open_files import preserve_open_files
from millstream.engine.generation.plan import GenerationBackend
from millstream.engine.jobs.plan import EncoderBackend
from millstream.engine.protocols import Backend
from millstream.engine.speech.plan import SpeechBackend
from millstream.engine.transcription.plan import TranscriptionBackend
from millstream.loading.settings import EngineSettings
from millstream.models.encoder_layout import EncoderLayout
from millstream.models.source import ModelSource
from millstream.models.speech_layout import TOKENIZED_FAMILIES, SpeechLayout
from millstream.models.transcription_layout import family_of, has_vocabulary
from millstream.text.grammars.grammar import compiler_of
from millstream.text.speech_vocabulary import speech_vocabulary, text_encoder

BackendMaker = Callable[[ModelSource, EngineSettings], Backend[Any, Any, Any, Any]]


def generation_backend(source: ModelSource, settings: EngineSettings) -> GenerationBackend:
    """Creates the MLX backend of a text generation model."""
    blas = _prepare_process(settings)
    with preserve_open_files():
        from millstream.backend import mlx_lm_import  # noqa: F401  before all that imports mlx-lm
        from millstream.backend.device import use_device
        from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
        from millstream.backend.generation.settings import DraftSettings
        from millstream.backend.generation.spec_prefill.spec_prefill import SpecPrefillSettings

    use_device(settings.device, settings.kernel_dir)
    draft = settings.draft
    return MlxGenerationBackend(
        GenerationSettings(
            source.kind,
            Path(source.path),
            max_rows=settings.max_batch,
            unpack=settings.unpack,
            disabled=settings.disabled,
            layout=settings.layout,
            blas=blas,
            kv_bits=settings.kv_bits,
            cache_limit=settings.cache_limit,
            grammars=compiler_of(source),
            feature_bytes=settings.feature_bytes,
            draft=None if draft is None else DraftSettings(draft.kind, Path(draft.path), settings.draft_depth),
            speculation=settings.speculation,
            spec_prefill=SpecPrefillSettings(settings.spec_prefill, settings.spec_prefill_tokens)
            if settings.spec_prefill < 1
            else None,
        )
    )


def encoder_backend(
    source: ModelSource, settings: EngineSettings, layout: EncoderLayout, tokens: tuple[int, tuple[int, int] | None]
) -> EncoderBackend:
    """Creates the MLX backend of an embedding model or a reranker. `tokens`: the one for padding, and those for no and
    yes where the model answers with them."""
    blas = _prepare_process(settings)
    with preserve_open_files():
        from millstream.backend import mlx_lm_import  # noqa: F401  before all that imports mlx-lm
        from millstream.backend.device import use_device
        from millstream.backend.encoders.backend import EncoderSettings, MlxEncoderBackend

    use_device(settings.device, settings.kernel_dir)
    padding, answers = tokens
    return MlxEncoderBackend(
        EncoderSettings(
            source.path,
            layout,
            pad_token=padding,
            answers=answers,
            capacity=settings.max_batch,
            unpack=settings.unpack,
            disabled=settings.disabled,
            blas=blas,
            cache_limit=settings.cache_limit,
        )
    )


def speech_backend(source: ModelSource, settings: EngineSettings, layout: SpeechLayout) -> SpeechBackend:
    """Creates the MLX backend of a speech model."""
    blas = _prepare_process(settings)
    with preserve_open_files():
        from millstream.backend import mlx_lm_import  # noqa: F401  before all that imports mlx-lm
        from millstream.backend.device import use_device
        from millstream.backend.speech.backend import MlxSpeechBackend, SpeechSettings

    use_device(settings.device, settings.kernel_dir)
    return MlxSpeechBackend(
        SpeechSettings(
            source.path,
            layout,
            encode=text_encoder(source) if layout.family in TOKENIZED_FAMILIES else None,
            capacity=settings.max_batch,
            disabled=settings.disabled,
            blas=blas,
            cache_limit=settings.cache_limit,
        )
    )


def transcription_backend(source: ModelSource, settings: EngineSettings, rows: int | None) -> TranscriptionBackend:
    """Creates the MLX backend of a transcription model. `rows`: windows at the same time, if memory bounds them."""
    blas = _prepare_process(settings)
    with preserve_open_files():
        from millstream.backend import mlx_lm_import  # noqa: F401  before all that imports mlx-lm
        from millstream.backend.device import use_device
        from millstream.backend.transcription.backend import MlxTranscriptionBackend, TranscriptionSettings

    use_device(settings.device, settings.kernel_dir)
    return MlxTranscriptionBackend(
        TranscriptionSettings(
            source.path,
            speech_vocabulary(source) if has_vocabulary(family_of(source.path)) else None,
            capacity=settings.max_batch,
            max_rows=rows,
            disabled=settings.disabled,
            blas=blas,
            cache_limit=settings.cache_limit,
        )
    )


def _prepare_process(settings: EngineSettings) -> str | None:
    """What must happen before MLX is imported. Returns the name of the BLAS that was loaded."""
    if settings.shares_cores:
        share_cores()
    if settings.yields:
        yield_to_others()
    blas = load_blas(settings.blas)
    avoid_cudnn_attention()
    commit_large_graphs()
    return blas
