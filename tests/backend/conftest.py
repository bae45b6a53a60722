"""Models that see, made once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a tiny random model of a family that takes images."""
    from support.tiny_vision import write_vision_model

    root = tmp_path_factory.mktemp("tiny-vision-models")

    def get(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else write_vision_model(folder, family)

    return get
