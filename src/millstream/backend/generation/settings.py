"""The settings that an MLX generation engine gets: resolved, plain, and only what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millstream.backend.generation.sampling.guides import Compiler
from millstream.backend.generation.spec_prefill.spec_prefill import SpecPrefillSettings


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """A draft model: a smaller one with the same vocabulary, which runs beside the target on its owner."""

    kind: Literal["folder", "gguf"]
    path: Path
    depth: int | None = None
    """The most tokens of a draft. None: what pays."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    kind: Literal["folder", "gguf"]
    path: Path
    max_rows: int
    unpack: bool = True
    disabled: frozenset[str] = frozenset()
    """Fast paths to leave out: see `config.FAST_PATHS`."""
    blas: str | None = None
    """The BLAS library that CPU matmuls go through, for the log."""
    cache_limit: int | None = None
    """Bytes of freed memory that MLX may hold for reuse. None: MLX's own limit."""
    kv_bits: int = 0
    """Bits per number of a quantised KV cache, 8 or 4; 0 for the type that the model computes in."""
    feature_bytes: int = 256 * 2**20
    """Memory for features of encoded media that later requests may reuse."""
    share_tokens: int | None = None
    """The fewest tokens that a row shares with the prefix cache; 0: it shares none. None: what suits the device."""
    like_gpu: bool = False
    """Use slots and grouped prefill as on a GPU, whatever the device, so that the CPU can test them."""
    layout: str = "auto"
    """One of `config.LAYOUTS`."""
    spec_prefill: SpecPrefillSettings | None = None
    """Read long prompts in part, as a draft model chooses. None: read all of them."""
    grammars: Compiler | None = None
    """Compiles the grammars of requests with structured output."""
    draft: DraftSettings | None = None
    speculation: bool = True
    """False: no drafts at all."""
