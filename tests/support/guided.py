"""A backend that follows grammars, made where its engine runs: in a thread or in a child."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millstream.backend.text_model import MlxTextBackend, TextModelSettings
from millstream.models.source import ModelSource
from millstream.text.grammar import compiler_of


def guided_backend(folder: Path, settings: dict[str, Any]) -> MlxTextBackend:
    grammars = compiler_of(ModelSource("tiny", "folder", folder))
    return MlxTextBackend(TextModelSettings("folder", folder, max_rows=6, grammars=grammars, **settings))
