"""A backend that follows grammars, made where its engine runs: in a thread or in a child."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.models.source import ModelSource
from millstream.text.grammars.grammar import compiler_of


def guided_backend(folder: Path, settings: dict[str, Any]) -> MlxGenerationBackend:
    grammars = compiler_of(ModelSource("tiny", "folder", folder))
    return MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=6, grammars=grammars, **settings))


def children_find_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in a process of its own imports this module, and the package that is tested."""
    places = [Path(__file__).parents[1], Path(millstream.__file__).parents[1]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
