"""A backend that follows grammars, made where its engine runs: in a thread or in a child."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.models.source import ModelSource
from millstream.text.grammars.grammar import compiler_of

if TYPE_CHECKING:
    from millstream.backend.generation.backend import MlxGenerationBackend


def guided_backend(folder: Path, settings: dict[str, Any]) -> MlxGenerationBackend:
    from millstream.backend import mlx_lm_import  # noqa: F401  before all that imports mlx-lm
    from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend

    grammars = compiler_of(ModelSource("tiny", "folder", folder))
    return MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=6, grammars=grammars, **settings))
